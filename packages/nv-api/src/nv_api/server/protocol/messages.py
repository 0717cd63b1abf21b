"""The shapes of /v1/messages: Anthropic's."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, WithJsonSchema

from nv_api.server.protocol.fields import Asked, Effort, Given, Integer, Json

_TEXT_BLOCK = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_NAME = {"type": "string", "minLength": 1}
_BLOCKS = [
    _TEXT_BLOCK,
    {
        "type": "object",
        "required": ["type", "tool_use_id"],
        "properties": {
            "type": {"const": "tool_result"},
            "tool_use_id": {"type": "string"},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "null"},
                    {"type": "array", "items": _TEXT_BLOCK},
                ]
            },
        },
    },
]
_OF_ASSISTANT = [
    _TEXT_BLOCK,
    {
        "type": "object",
        "required": ["type", "thinking"],
        "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}},
    },
    {
        "type": "object",
        "required": ["type", "id", "name", "input"],
        "properties": {
            "type": {"const": "tool_use"},
            "id": {"type": "string"},
            "name": _NAME,
            "input": {"type": "object"},
        },
    },
]


def _message(roles: list[str], blocks: list[Json]) -> Json:
    """The description of a message."""
    several = {"type": "array", "items": {"anyOf": blocks}}
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": roles},
            "content": {"anyOf": [{"type": "string"}, several]},
        },
    }


Messages = Annotated[
    list[Json],
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    _message(["user", "system"], _BLOCKS),
                    _message(["assistant"], _OF_ASSISTANT),
                ]
            },
        }
    ),
]
"""A conversation; `blocks.py` checks it."""
System = Annotated[
    str | list[Json],
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK}]}),
]
Tools = Annotated[
    list[Json],
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "input_schema"],
                "properties": {
                    "type": {"enum": ["custom", None]},
                    "name": _NAME,
                    "description": {"type": ["string", "null"]},
                    "input_schema": {"type": "object"},
                },
            },
        }
    ),
]


class ToolChoice(Asked):
    """Whether the model calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of the tool, for the type tool."""
    disable_parallel_tool_use: bool | None = None


class Thinking(Asked):
    """Whether the model thinks: `enable_thinking` of the chat template."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Integer | None = None
    """No effect: max_tokens is the only limit."""


class OutputConfig(Asked):
    """The form of the answer."""

    format: Json | None = None
    effort: Effort | None = None
    """A variable of the chat template, `reasoning_effort`."""


class CountTokensRequest(Asked):
    """A conversation whose tokens are counted."""

    messages: Messages
    model: str | None = None
    system: System | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Json | None = None
    """vLLM's."""
    cache_control: Json | None = None
    """No effect: prefixes are cached by themselves."""


class MessagesRequest(CountTokensRequest):
    """A conversation to continue."""

    max_tokens: Integer
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None

    min_p: float | None = None
    """vLLM's, and so are the following."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None

    metadata: Json | None = None
    """No effect, and so have the following."""
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Json | None = None
    speed: str | None = None

    container: Any = None
    """Not built, and neither is the following."""
    mcp_servers: list[Json] | None = None


class TextBlock(Given):
    """A text of the answer."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Given):
    """A thought; nothing checks its signature when it comes back."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Given):
    """A call of a tool; one that was cut has the input that came."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class MessageUsage(Given):
    """Tokens of one request; the prompt's are in three parts."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(Given):
    """The answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Given):
    """An event of a stream; what else it has depends on its type."""

    model_config = ConfigDict(extra="allow")

    type: str


class TokenCount(Given):
    """Tokens of a rendered conversation."""

    input_tokens: int


class AnthropicErrorDetail(Given):
    """The error."""

    type: str
    message: str


class AnthropicErrorEnvelope(Given):
    """Every error of these routes."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
