"""ChatJob: a request to /v1/chat/completions.

Owns what its fields mean. The template makes the prompt, and the server's parsers read the answer.
"""

from functools import cached_property
from typing import Any

from nv_engine import SamplingParams, StructuredOutputsParams
from nv_engine.values import shown

from nv_api.conversation import Rendering
from nv_api.prompts import TokenPrompt
from nv_api.said import Place, Speech, ToolCalls
from nv_api.server.answers.chat import ChatEvents, ChatForm, ChatWhole
from nv_api.server.answers.form import Head
from nv_api.server.demand import demand_of, own_demand
from nv_api.server.errors import ApiError, invalid, refusals, renamed, unsupported
from nv_api.server.generation import Generation
from nv_api.server.jobs.job import check_stream_options, ignored_fields
from nv_api.server.messages import check_no_template, check_rendered, conversation
from nv_api.server.probabilities import TokenNames
from nv_api.server.protocol.chat import ChatRequest
from nv_api.server.sampling import fitted, sampling_params
from nv_api.server.service import Service
from nv_api.server.tools import tools_of

LACKING = ("audio", "web_search_options", "functions", "function_call")
"""Fields that ask for what is not built."""
INSTEAD = {"functions": "use tools", "function_call": "use tool_choice"}


class ChatJob:
    """A conversation to continue.

    Args:
        asked: the request.
        service: the server's parts.
        request_id: of HTTP.

    Raises:
        ApiError: 400 or 404, a field is wrong.
    """

    operation = "chat"

    def __init__(self, asked: ChatRequest, service: Service, request_id: str) -> None:
        _check_built(asked)
        check_stream_options(asked)
        self._asked = asked
        self._service = service
        self._model = service.model_of(asked.model)
        self._head = Head(
            id=f"chatcmpl-{request_id}",
            model=self._model.name,
            has_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            has_running_usage=bool(
                asked.stream_options and asked.stream_options.continuous_usage_stats
            ),
            has_token_ids=bool(asked.return_token_ids),
        )
        self._num_top = _num_top(asked)
        self._messages = conversation(asked.messages)
        self._rendering = _rendering(asked, service.options.chat_template)
        self._tools = tools_of(asked)
        self._demand = demand_of(asked, self._tools, service.parsers, service.options)
        self._sent: StructuredOutputsParams | None = None
        self.ignored = ignored_fields(asked)
        self.params = self._params()
        self.num_sequences = self.params.n

    async def prompts(self) -> list[TokenPrompt]:
        """The rendered conversation."""
        with refusals("messages"):
            prompt = await self._service.llm.chat_prompt(self._messages, self._rendering)
        check_rendered(self._messages, prompt)
        salted = prompt._replace(cache_salt=self._asked.cache_salt, lora=self._model.lora)
        return [self._service.parsers.placed(salted)]

    def params_of(self, prompt: TokenPrompt) -> SamplingParams:
        """With the form that the answer must have, which begins after its thought."""
        place = prompt.place or Place.AFTER
        own = self.params.structured_outputs
        if own is not None and place is not Place.AFTER:
            self._demand = own_demand(own)
        params = self.params
        if self._demand is not None:
            self._sent = self._demand.params(place, self._service.parsers.tags)
            params = params.clone()
            params.structured_outputs = self._sent
        return fitted(params, len(prompt.token_ids), self._service.llm.facts.max_model_len)

    async def explained(self, error: ApiError) -> ApiError:
        """With the name of the field whose schema is wrong."""
        if self._demand is None or self._sent is None:
            return error
        return await self._demand.explained(error, self._sent)

    def events(self, generation: Generation) -> ChatEvents | None:
        """The streamed answer, if that is asked for."""
        if not self._asked.stream:
            return None
        (request,) = generation.requests
        return ChatEvents(self._form(request.prompt), request, generation.usage)

    def whole(self, generation: Generation) -> ChatWhole:
        """The answer in one piece."""
        (request,) = generation.requests
        return ChatWhole(self._form(request.prompt), request)

    def speech(self, prompt: TokenPrompt) -> Speech:
        """A reader of one completion of a rendered prompt."""
        return self._service.parsers.speech(prompt, self.calls())

    def calls(self) -> ToolCalls | None:
        """A reader of the calls in one completion; None: it has none."""
        tools = self._tools
        functions = [*tools.functions.values()]
        return self._service.parsers.calls(functions, is_forced=tools.is_forced)

    def _form(self, prompt: TokenPrompt) -> ChatForm:
        parsers = self._service.parsers
        has_thoughts = parsers.thoughts is not None and self._asked.include_reasoning is not False
        return ChatForm(
            head=self._head,
            names=self._names,
            num_top=self._num_top,
            new_speech=lambda: self.speech(prompt),
            has_thoughts=has_thoughts,
            reason_of_calls=self._tools.finish_reason,
            num_choices=self.params.n,
        )

    @cached_property
    def _names(self) -> TokenNames:
        as_ids = bool(self._asked.return_tokens_as_token_ids)
        return TokenNames(self._service.llm.text, as_ids)

    def _params(self) -> SamplingParams:
        """Its max_tokens is None unless the request has one."""
        asked = self._asked
        most = asked.max_completion_tokens
        if most is not None and most < 1:
            raise invalid(
                f"max_completion_tokens is {most}: it must be at least 1", "max_completion_tokens"
            )
        if asked.stream and asked.prompt_logprobs is not None:
            raise invalid(
                "prompt_logprobs are not sent in a stream: leave one of them out", "prompt_logprobs"
            )
        with renamed({"logprobs": "top_logprobs"}):  # the number's name in a chat
            return sampling_params(
                asked,
                _without_length(self._service.default_params),
                self._service.options,
                max_tokens=asked.max_tokens if most is None else most,
                logprobs=self._num_top,
            )


def _without_length(defaults: SamplingParams) -> SamplingParams:
    """The defaults, changed for a chat: an answer may take the rest of the context."""
    defaults.max_tokens = None
    return defaults


def _num_top(asked: ChatRequest) -> int | None:
    """Most likely tokens beside each; None: no log-probabilities."""
    if asked.logprobs:
        return asked.top_logprobs or 0
    if asked.top_logprobs:
        raise invalid(
            f"top_logprobs is {asked.top_logprobs} and logprobs is not true: set logprobs to true",
            "top_logprobs",
        )
    return None


def _rendering(asked: ChatRequest, template: str | None) -> Rendering:
    """How the conversation becomes a prompt.

    Args:
        asked: the request.
        template: of the server, in place of the model's own.

    Raises:
        ApiError: 400, the fields contradict each other.
    """
    kwargs: dict[str, Any] = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        kwargs["reasoning_effort"] = asked.reasoning_effort
    if asked.documents is not None:
        kwargs["documents"] = asked.documents
    continues = bool(asked.continue_final_message)
    opens = asked.add_generation_prompt
    with refusals("continue_final_message"):
        return Rendering(
            chat_template=template,
            add_generation_prompt=not continues if opens is None else opens,
            continue_final_message=continues,
            tools=None if asked.tool_choice == "none" else asked.tools or None,
            chat_template_kwargs=kwargs or None,
        )


def _check_built(asked: ChatRequest) -> None:
    """Refuse what is not built, and templates.

    Raises:
        ApiError: 400.
    """
    check_no_template(asked.chat_template)
    for name in LACKING:
        if getattr(asked, name) is not None:
            advice = INSTEAD.get(name, "leave it out")
            raise unsupported(f"{name} is not built: {advice}", name)
    if asked.modalities is not None and asked.modalities != ["text"]:
        raise unsupported(
            f"modalities is {shown(asked.modalities)}: only ['text'] is built", "modalities"
        )
