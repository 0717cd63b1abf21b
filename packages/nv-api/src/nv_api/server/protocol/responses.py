"""The shapes of /v1/responses."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, WithJsonSchema

from nv_api.server.protocol.fields import (
    Asked,
    Effort,
    Given,
    Integer,
    Json,
    StreamOptions,
    TextOrTexts,
    Verbosity,
)

_PARTS = {
    "type": "array",
    "items": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "required": ["text"],
                "properties": {
                    "type": {"enum": ["input_text", "output_text", "text"]},
                    "text": {"type": "string"},
                },
            },
        ]
    },
}
_THOUGHTS = {
    "type": "array",
    "items": {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
}
_NAME = {"type": "string", "minLength": 1}
_CONTENT = {"anyOf": [{"type": "string"}, _PARTS]}
_ITEMS = [
    {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "type": {"const": "message"},
            "role": _NAME,
            "content": _CONTENT,
        },
    },
    {
        "type": "object",
        "required": ["type", "call_id", "name", "arguments"],
        "properties": {
            "type": {"const": "function_call"},
            "call_id": _NAME,
            "name": _NAME,
            "arguments": {
                "anyOf": [{"type": "string"}, {"type": "object"}],
                "description": "An object, or its JSON text.",
            },
        },
    },
    {
        "type": "object",
        "required": ["type", "call_id", "output"],
        "properties": {
            "type": {"const": "function_call_output"},
            "call_id": _NAME,
            "output": _CONTENT,
        },
    },
    {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"const": "reasoning"},
            "content": {"anyOf": [_THOUGHTS, {"type": "null"}]},
            "summary": {"anyOf": [_THOUGHTS, {"type": "null"}]},
        },
    },
]
Input = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"anyOf": _ITEMS}},
            ]
        }
    ),
]
"""A text, or items; `items.py` checks it."""
Tools = Annotated[
    list[Json],
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "name"],
                "properties": {
                    "type": {"const": "function"},
                    "name": _NAME,
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                },
            },
        }
    ),
]
ToolChoice = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}),
]


class Reasoning(Asked):
    """How much the model thinks."""

    effort: Effort | None = None
    """A variable of the chat template; "none" also sets `enable_thinking` to false."""
    summary: str | None = None
    """No effect, and so has the following: thoughts are returned as they are."""
    generate_summary: str | None = None


class Text(Asked):
    """The form of the answer."""

    format: Json | None = None
    verbosity: Verbosity | None = None
    """No effect."""


class ResponsesRequest(Asked):
    """A conversation to continue."""

    input: Input
    instructions: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None

    top_k: Integer | None = None
    """vLLM's, and so are the following."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = None
    stop: TextOrTexts | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: Json | None = None
    cache_salt: str | None = None

    include: list[str] | None = None
    """"message.output_text.logprobs" asks for log-probabilities."""
    top_logprobs: Integer | None = None
    """Most likely tokens beside each token that has them."""
    metadata: Json | None = None
    """Returned with the response."""
    store: bool | None = None
    """No effect, and so have the following: nothing is stored."""
    max_tool_calls: Integer | None = None
    truncation: str | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Json | None = None
    prompt_cache_retention: str | None = None

    background: bool | None = None
    """Not built, and neither are the following."""
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Json | None = None
    context_management: Any = None
    moderation: Json | None = None


class ReasoningText(Given):
    """A thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputText(Given):
    """A text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class ReasoningItem(Given):
    """The thoughts of the model."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class MessageItem(Given):
    """The answer of the model."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCallItem(Given):
    """A call of a function; of one that is incomplete, the arguments are not whole JSON."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(Given):
    """Of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Given):
    """Of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Given):
    """Tokens of one request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Given):
    """The reason for which a response failed."""

    code: str
    message: str


class IncompleteDetails(Given):
    """The reason for which a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(Given):
    """The answer, with what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[ReasoningItem | MessageItem | FunctionCallItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[Json]
    tool_choice: Any
    parallel_tool_calls: bool
    reasoning: Json
    text: Json
    truncation: Literal["disabled"]
    metadata: Json
    background: Literal[False]
    store: Literal[False]
    previous_response_id: None
    service_tier: Literal["default"]


class ResponseEvent(Given):
    """An event of a stream; what else it has depends on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
