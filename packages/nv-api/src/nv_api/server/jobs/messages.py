"""MessagesJob: a request to /v1/messages, as a chat with another form.

Owns what its fields mean, in the fields of a chat.
"""

from nv_engine.values import shown

from nv_api.server.answers.messages import MessageEvents, MessageForm, MessageWhole
from nv_api.server.blocks import is_begun, messages_of
from nv_api.server.errors import invalid, unsupported
from nv_api.server.generation import Generation
from nv_api.server.jobs.translated import Translated
from nv_api.server.protocol.fields import Json
from nv_api.server.protocol.messages import CountTokensRequest, MessagesRequest, ToolChoice
from nv_api.server.service import Service

NAMES = {
    "max_completion_tokens": "max_tokens",
    "continue_final_message": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Fields of a chat, and their names here."""
SHARED = (
    *("stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "seed", "ignore_eos", "cache_salt"),
)
"""Fields that a chat has too."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKS = {"enabled": True, "disabled": False}
"""`enable_thinking` of the chat template; of other types, it is left out."""
LACKING = ("container", "mcp_servers")


class MessagesJob(Translated):
    """A conversation to continue.

    Args:
        asked: the request.
        service: the server's parts.
        request_id: of HTTP.

    Raises:
        ApiError: 400 or 404, a field is wrong.
    """

    def __init__(self, asked: MessagesRequest, service: Service, request_id: str) -> None:
        for name in LACKING:
            if getattr(asked, name):
                raise unsupported(f"{name} is not built: leave it out", name)
        chat = _chat(asked) | {name: getattr(asked, name) for name in SHARED}
        chat |= {"max_completion_tokens": asked.max_tokens, "stop": asked.stop_sequences}
        super().__init__(asked, chat, NAMES, service, request_id)
        self._model = service.model_of(asked.model).name
        self._request_id = request_id

    def events(self, generation: Generation) -> MessageEvents | None:
        """The streamed answer, if that is asked for."""
        if not self._is_streamed:
            return None
        return MessageEvents(self._form(generation), generation.usage)

    def whole(self, generation: Generation) -> MessageWhole:
        """The answer in one piece."""
        return MessageWhole(self._form(generation))

    def _form(self, generation: Generation) -> MessageForm:
        return MessageForm(
            request_id=self._request_id, model=self._model, speech=self.speech(generation)
        )


async def count_tokens(asked: CountTokensRequest, service: Service, request_id: str) -> int:
    """Tokens of the rendered conversation.

    Raises:
        ApiError: 400 or 404, a field is wrong.
    """
    job = Translated(asked, _chat(asked), NAMES, service, request_id)
    (prompt,) = await job.prompts()
    return len(prompt.token_ids)


def _chat(asked: CountTokensRequest) -> Json:
    """The fields of the same conversation as a chat."""
    messages = messages_of(asked.messages, asked.system)
    config, choice = asked.output_config, asked.tool_choice
    kwargs = dict(asked.chat_template_kwargs or {})
    if asked.thinking is not None and asked.thinking.type in THINKS:
        kwargs.setdefault("enable_thinking", THINKS[asked.thinking.type])
    return {
        "model": asked.model,
        "messages": messages,
        "continue_final_message": is_begun(messages) or None,
        "tools": _tools(asked),
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "chat_template_kwargs": kwargs or None,
        "reasoning_effort": config.effort if config else None,
        "response_format": _format(config.format if config else None),
    }


def _tools(asked: CountTokensRequest) -> list[Json] | None:
    """A chat's tools."""
    found: list[Json] = []
    for index, tool in enumerate(asked.tools or []):
        place = f"tools.{index}"
        if tool.get("type") not in (None, "custom"):
            raise unsupported(
                f"{place}.type is {shown(tool['type'])}: only custom is built", f"{place}.type"
            )
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not name:
            raise invalid(
                f"{place}.name is {shown(name)}: it must be a text that is not empty",
                f"{place}.name",
            )
        if not isinstance(schema, dict):
            raise invalid(
                f"{place}.input_schema is {shown(schema)}: it must be a JSON schema",
                f"{place}.input_schema",
            )
        function: Json = {"name": name}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        found.append({"type": "function", "function": {**function, "parameters": schema}})
    return found or None


def _choice(given: ToolChoice) -> str | Json:
    """A chat's tool_choice."""
    if given.type == "tool":
        return {"type": "function", "function": {"name": given.name}}
    return CHOICES[given.type]


def _format(given: Json | None) -> Json | None:
    """A chat's response_format."""
    if given is None:
        return None
    kind, schema = given.get("type"), given.get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise invalid(
            f"output_config.format is {shown(given)}: it must have the type json_schema and a "
            "schema",
            "output_config.format",
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
