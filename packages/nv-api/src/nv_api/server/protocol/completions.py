"""The shapes of /v1/completions."""

from typing import Any, Literal

from nv_api.server.protocol.fields import Given, Inputs, Integer, Sampling, Usage


class CompletionRequest(Sampling):
    """Texts to continue."""

    prompt: Inputs
    logprobs: Integer | None = None
    echo: bool | None = None
    """The text, and with `logprobs` its log-probabilities, begin with the prompt's."""
    suffix: str | None = None
    best_of: Integer | None = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(Given):
    """A column for each property of the tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Given):
    """One completion, or in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None


class CompletionResponse(Given):
    """All completions of all prompts."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Given):
    """An event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
