"""The shapes of /tokenize, /detokenize and /tokenizer_info; vLLM's."""

from typing import Any

from pydantic import ConfigDict

from nv_api.server.protocol.chat import Messages, Tools
from nv_api.server.protocol.fields import Asked, Given, Integer, Json


class TokenizeRequest(Asked):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """None: True for a text, False for a conversation, whose template has them."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: Json | None = None
    tools: Tools | None = None


class TokenizeResponse(Given):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Asked):
    """Token ids."""

    model: str | None = None
    tokens: list[Integer]


class DetokenizeResponse(Given):
    """Their text."""

    prompt: str


class TokenizerInfo(Given):
    """The facts of the tokenizer; more fields than these."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | None
