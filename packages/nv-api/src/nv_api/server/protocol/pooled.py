"""Fields that the requests of routes that pool share, and what their responses share.

Owns the shapes; names are vLLM's.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, JsonValue, WithJsonSchema

from nv_api.server.protocol.chat import Messages
from nv_api.server.protocol.fields import Asked, Given, Inputs, Integer, Json, PromptTokensDetails

_TEXTS: list[Json] = [
    {"type": "string", "minLength": 1},
    {
        "type": "object",
        "required": ["text"],
        "properties": {"text": {"type": "string", "minLength": 1}},
    },
]
Text = Annotated[Any, WithJsonSchema({"anyOf": _TEXTS})]
"""A text, or an object with a `text`; `jobs/pairs.py` checks it."""
Texts = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [*_TEXTS, {"type": "array", "items": {"anyOf": _TEXTS}, "minItems": 1}]}
    ),
]
"""One of these or a list."""


def one_of(*names: tuple[str, ...]) -> ConfigDict:
    """Shows in a schema that a request has exactly one of some groups of fields.

    Args:
        *names: of each group.
    """
    groups: list[JsonValue] = [{"required": [*group]} for group in names]
    return ConfigDict(json_schema_extra={"oneOf": groups})


class Pooled(Asked):
    """Of every request that pools; None: the model's default."""

    model: str | None = None
    truncate_prompt_tokens: Integer | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    """Another name of `use_activation`."""
    cache_salt: str | None = None
    user: str | None = None
    """No effect."""

    priority: Integer | None = None
    """Refused unless it is 0: requests run in their order."""
    truncation_side: Literal["left"] | None = None
    """The last tokens are kept."""
    padding: Literal["do_not_pad"] | None = None
    mm_processor_kwargs: Json | None = None
    """Refused: only text is built."""


class PooledInput(Pooled):
    """Texts or token ids, or one conversation."""

    model_config = one_of(("input",), ("messages",))

    input: Inputs | None = None
    add_special_tokens: bool | None = None
    """None: True for a text, False for a conversation, whose template has them."""
    prompt_name: str | None = None
    """Of a prompt of the model's that goes in front of each text."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Json | None = None
    chat_template: Any = None
    """Refused: a template is a program."""


class Encoded(Asked):
    """How numbers are sent."""

    encoding_format: Literal["float", "base64"] | None = None
    """In base64 they are fp32, the lowest byte first."""
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    dimensions: Integer | None = None


class PooledUsage(Given):
    """Tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PooledResponse(Given):
    """The fields of every response but those of rerank."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: PooledUsage
