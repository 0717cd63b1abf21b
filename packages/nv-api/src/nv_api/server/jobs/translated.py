"""Translated: a request of another dialect, run as a chat.

Owns what such jobs share: the chat in their place, and the names of fields in its errors.
"""

from collections.abc import Mapping

from nv_engine import SamplingParams

from nv_api.prompts import TokenPrompt
from nv_api.said import Speech
from nv_api.server.body import checked
from nv_api.server.errors import ApiError, renamed
from nv_api.server.generation import Generation
from nv_api.server.jobs.chat import ChatJob
from nv_api.server.jobs.job import ignored_fields
from nv_api.server.message_tokens import MessageTokens
from nv_api.server.protocol.chat import ChatRequest
from nv_api.server.protocol.fields import Asked, Json
from nv_api.server.service import Service


class Translated:
    """A conversation to continue: one prompt, one completion.

    Args:
        asked: the request.
        chat: the fields of the same request as a chat; None: it is left out.
        names: fields of a chat, and their names in the dialect.
        service: the server's parts.
        request_id: of HTTP.

    Raises:
        ApiError: 400 or 404, a field is wrong.
    """

    operation = "chat"
    num_sequences = 1

    def __init__(
        self,
        asked: Asked,
        chat: Json,
        names: Mapping[str, str],
        service: Service,
        request_id: str,
    ) -> None:
        self._names = names
        self._service = service
        given = {name: value for name, value in chat.items() if value is not None}
        with renamed(names):
            self._chat = checked(ChatRequest, given)
            self._job = ChatJob(self._chat, service, request_id)
        self.params = self._job.params
        self._is_streamed = bool(self._chat.stream)
        self.ignored = ignored_fields(asked)

    async def prompts(self) -> list[TokenPrompt]:
        """The rendered conversation."""
        with renamed(self._names):
            return await self._job.prompts()

    def params_of(self, prompt: TokenPrompt) -> SamplingParams:
        """The parameters, with the form that the answer must have."""
        with renamed(self._names):
            return self._job.params_of(prompt)

    async def explained(self, error: ApiError) -> ApiError:
        """A refusal of the engine, with the dialect's name of the field that is wrong."""
        return (await self._job.explained(error)).renamed(self._names)

    def speech(self, generation: Generation) -> Speech:
        """A reader of the answer."""
        (request,) = generation.requests
        return self._job.speech(request.prompt)

    def messages(self, generation: Generation) -> MessageTokens:
        """A reader of the answer's tokens."""
        text = self._service.llm.text
        assert text is not None, "a chat has a template"
        return MessageTokens(
            lambda: generation.usage().reasoning_tokens, self._job.calls(), text.shown_text
        )
