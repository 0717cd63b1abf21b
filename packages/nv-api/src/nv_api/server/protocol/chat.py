"""The shapes of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from nv_api.server.protocol.fields import (
    Effort,
    Given,
    Integer,
    Json,
    Sampling,
    Usage,
    Verbosity,
)

Messages = Annotated[
    list[Json],
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string", "minLength": 1},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {"type": "null"},
                            {
                                "type": "array",
                                "items": {
                                    "anyOf": [
                                        {"type": "string"},
                                        {
                                            "type": "object",
                                            "required": ["text"],
                                            "properties": {
                                                "type": {"type": "string"},
                                                "text": {"type": "string"},
                                            },
                                        },
                                    ]
                                },
                            },
                        ]
                    },
                },
            },
        }
    ),
]
"""A conversation; `nv_api.conversation` checks it."""
Tools = Annotated[
    list[Json],
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string", "minLength": 1},
                            "description": {"type": ["string", "null"]},
                            "parameters": {"type": ["object", "null"]},
                        },
                    },
                },
            },
        }
    ),
]
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
    ),
]


class ChatRequest(Sampling):
    """A conversation to continue."""

    messages: Messages
    max_completion_tokens: Integer | None = None
    """The same as max_tokens, which it overrides."""
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    """Refused: a template is a program."""
    chat_template_kwargs: Json | None = None
    documents: list[Json] | None = None
    """For templates that read them."""

    store: bool | None = None
    """No effect, and so have the following."""
    metadata: Json | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: Json | None = None
    verbosity: Verbosity | None = None

    modalities: list[str] | None = None
    """Only text is built; a request for the following is refused."""
    audio: Json | None = None
    web_search_options: Json | None = None
    functions: list[Json] | None = None
    function_call: Any = None


class TopLogprob(Given):
    """A token that was likely at one position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token that was drawn there."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Given):
    """Of each token of a choice."""

    content: list[TokenLogprob]


class CalledFunction(Given):
    """A function, and the JSON text of what it is called with."""

    name: str
    arguments: str


class ToolCall(Given):
    """A call of a function."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Given):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """None: it is calls or thoughts alone."""
    refusal: None = None
    reasoning_content: str | None = None
    """The model's thoughts; the field is there if the server finds them."""
    reasoning: str | None = None
    """The same."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Given):
    """One completion."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(Given):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(Given):
    """The new part of a function that is called: its name comes first, and whole."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Given):
    """The new part of a call: only the first has its id and type."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Given):
    """The new part of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Given):
    """The new part of a completion."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(Given):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
