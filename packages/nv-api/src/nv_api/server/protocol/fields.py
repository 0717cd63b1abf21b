"""Fields that the requests of several routes share.

Owns the kinds of fields, and the model that keeps what it does not know.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema


class Asked(BaseModel):
    """A request's body: strict about kinds, and open to unknown fields, which it keeps."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    @property
    def unknown(self) -> list[str]:
        """Names of fields that this server does not know."""
        return [*(self.model_extra or {})]


class Given(BaseModel):
    """A response's body, or a part of it."""

    model_config = ConfigDict(protected_namespaces=())


def _whole(value: object) -> object:
    """JSON has one kind of number: 5.0 is the integer 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[
    int, BeforeValidator(_whole, json_schema_input_type=int), WithJsonSchema({"type": "integer"})
]

TextOrTexts = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""A text or a list of texts; `SamplingParams` checks it."""
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Inputs = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _IDS,
                {"type": "array", "items": _TEXT, "minItems": 1},
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
"""A text, token ids, or a list of either; `inputs.py` checks it."""
Biases = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
"""A number for each of some token ids, which are texts, as every key of JSON."""
Json = dict[str, Any]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model thinks; a variable of the chat template, `reasoning_effort`."""
Verbosity = Literal["low", "medium", "high"]


class StreamOptions(Asked):
    """Options of a stream."""

    include_usage: bool | None = None
    """A chunk with the usage before the end."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk; vLLM's."""
    include_obfuscation: bool | None = None
    """No effect."""


class Sampling(Asked):
    """The fields of `SamplingParams` that a request may have; None: the model's default."""

    n: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: TextOrTexts | None = None
    stop_token_ids: list[Integer] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Integer | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: list[Integer] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: Json | None = None
    response_format: Json | None = None

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    """No effect."""


class PromptTokensDetails(Given):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(Given):
    """Of the completions' tokens."""

    reasoning_tokens: int


class Usage(Given):
    """Tokens of one request; a prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
