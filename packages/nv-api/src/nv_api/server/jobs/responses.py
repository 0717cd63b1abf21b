"""ResponsesJob: a request to /v1/responses, as a chat with another form.

Owns what its fields mean, in the fields of a chat. Nothing is stored between requests.
"""

import time
from typing import Any

from nv_engine.values import shown

from nv_api.server.answers.responses import ResponseEvents, ResponseForm, ResponseWhole
from nv_api.server.errors import invalid, unsupported
from nv_api.server.generation import Generation
from nv_api.server.items import messages_of
from nv_api.server.jobs.job import check_stream_options
from nv_api.server.jobs.translated import Translated
from nv_api.server.probabilities import TokenNames
from nv_api.server.protocol.fields import Json
from nv_api.server.protocol.responses import ResponsesRequest
from nv_api.server.service import Service

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat, and their names here."""
SHARED = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "seed", "stop", "ignore_eos", "cache_salt"),
    "parallel_tool_calls",
)
"""Fields that a chat has too."""
LACKING = {
    "previous_response_id": "this server keeps no responses: send the whole input",
    "conversation": "this server keeps no conversations: send the whole input",
    "background": "a response is returned on the connection that asked for it: leave it out",
    "prompt": "this server has no prompt templates: send instructions and input",
    "context_management": "this server cuts nothing out of the input: leave it out",
    "moderation": "there is no moderation: leave it out",
}
"""Fields that ask for what is not built, and what to do instead."""
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""Entries of `include`; the second is accepted without effect."""


class ResponsesJob(Translated):
    """A conversation to continue.

    Args:
        asked: the request.
        service: the server's parts.
        request_id: of HTTP.

    Raises:
        ApiError: 400 or 404, a field is wrong.
    """

    def __init__(self, asked: ResponsesRequest, service: Service, request_id: str) -> None:
        _check_built(asked)
        check_stream_options(asked)
        super().__init__(asked, _chat(asked), NAMES, service, request_id)
        self._asked = asked
        self._model = service.model_of(asked.model)
        self._name = request_id
        self._created_at = int(time.time())

    def events(self, generation: Generation) -> ResponseEvents | None:
        """The streamed answer, if that is asked for."""
        if not self._is_streamed:
            return None
        return ResponseEvents(self._form(generation))

    def whole(self, generation: Generation) -> ResponseWhole:
        """The answer in one piece."""
        return ResponseWhole(self._form(generation))

    def _form(self, generation: Generation) -> ResponseForm:
        has_logprobs = LOGPROBS in (self._asked.include or ())
        return ResponseForm(
            name=self._name,
            fields=self._fields(),
            speech=self.speech(generation),
            num_top=(self._asked.top_logprobs or 0) if has_logprobs else None,
            names=TokenNames(self._service.llm.text),
            messages=self.messages(generation),
        )

    def _fields(self) -> Json:
        """The fields of a response that repeat the request."""
        asked = self._asked
        return {
            "created_at": self._created_at,
            "model": self._model.name,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "tools": [_shown_tool(tool) for tool in asked.tools or []],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "reasoning": {
                "effort": asked.reasoning.effort if asked.reasoning else None,
                "summary": None,
            },
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "truncation": "disabled",
            "metadata": asked.metadata or {},
            "background": False,
            "store": False,
            "previous_response_id": None,
            "service_tier": "default",
        }


def _chat(asked: ResponsesRequest) -> Json:
    """The fields of the same request as a chat."""
    tools, choice = _choice(_tools(asked), asked.tool_choice)
    effort = asked.reasoning.effort if asked.reasoning else None
    kwargs = dict(asked.chat_template_kwargs or {})
    if effort == "none":
        kwargs.setdefault("enable_thinking", False)
    fields: Json = {name: getattr(asked, name) for name in SHARED}
    if LOGPROBS in (asked.include or ()):
        fields |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    fields |= {
        "messages": messages_of(asked.input, asked.instructions),
        "max_completion_tokens": asked.max_output_tokens,
        "tools": tools,
        "tool_choice": choice,
        "reasoning_effort": effort,
        "chat_template_kwargs": kwargs or None,
        "response_format": _format(asked.text.format if asked.text else None),
    }
    return fields


def _tools(asked: ResponsesRequest) -> list[Json] | None:
    """A chat's tools."""
    found: list[Json] = []
    for index, tool in enumerate(asked.tools or []):
        place = f"tools.{index}"
        if tool.get("type") != "function":
            raise unsupported(
                f"{place}.type is {shown(tool.get('type'))}: only function is built",
                f"{place}.type",
            )
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise invalid(
                f"{place}.name is {shown(tool.get('name'))}: it must be a text that is not empty",
                f"{place}.name",
            )
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found or None


def _shown_tool(tool: Json) -> Json:
    """A tool as a response repeats it."""
    return {"description": None, "parameters": None, "strict": False, **tool}


def _choice(
    tools: list[Json] | None,
    given: Any,  # noqa: ANN401  # checked here and by `ChatJob`
) -> tuple[list[Json] | None, Any]:
    """A chat's tools and tool_choice: "allowed_tools" leaves only some tools."""
    if not isinstance(given, dict):
        return tools, given
    if given.get("type") == "function":
        return tools, {"type": "function", "function": {"name": given.get("name")}}
    allowed = given.get("tools")
    if given.get("type") != "allowed_tools" or not isinstance(allowed, list):
        raise unsupported(
            f"tool_choice is {shown(given)}: it must be none, auto, required, or an object of the "
            "type function or allowed_tools",
            "tool_choice",
        )
    known = {tool["function"]["name"]: tool for tool in tools or []}
    names = [tool.get("name") if isinstance(tool, dict) else None for tool in allowed]
    for name in names:
        if name not in known:
            raise invalid(
                f"tool_choice allows {shown(name)}, which is not one of the tools: "
                f"{', '.join(known) or 'there are none'}",
                "tool_choice",
            )
    return [tool for name, tool in known.items() if name in names], given.get("mode", "auto")


def _format(given: Json | None) -> Json | None:
    """A chat's response_format."""
    kind = None if given is None else given.get("type")
    if given is None or kind in ("text", "json_object"):
        return given
    if kind != "json_schema":
        raise invalid(
            f"text.format.type is {shown(kind)}: it must be text, json_object or json_schema",
            "text.format.type",
        )
    if not isinstance(given.get("schema"), dict):
        raise invalid(
            f"text.format.schema is {shown(given.get('schema'))}: it must be a JSON schema",
            "text.format.schema",
        )
    named = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": named}


def _check_built(asked: ResponsesRequest) -> None:
    """Refuse what is not built.

    Raises:
        ApiError: 400.
    """
    for name, advice in LACKING.items():
        if getattr(asked, name):
            raise unsupported(f"{name} is not built: {advice}", name)
    for entry in asked.include or []:
        if entry not in INCLUDABLE:
            raise unsupported(
                f"include has {shown(entry)}, which is not built: leave it out", "include"
            )
