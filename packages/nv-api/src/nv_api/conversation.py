"""Conversations: messages in, the prompt text of the checkpoint's chat template out.

Owns how messages are checked and rendered; the template itself is the tokenizer's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """How a conversation becomes a prompt; names as `LLM.chat`.

    Raises:
        ValueError: a prompt that both opens a new message and continues the last one.
    """

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "continue_final_message=True goes on with the last message and "
                "add_generation_prompt=True opens a new one: pass add_generation_prompt=False"
            )


def conversation_list(messages: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """One conversation or several, as a list of conversations.

    Raises:
        TypeError: a message that is no dict.
        ValueError: an empty conversation, or a message without a role.
    """
    single = bool(messages) and isinstance(messages[0], Mapping)
    conversations = [messages] if single else messages
    return [[_message(message) for message in _conversation(c)] for c in conversations]


def render(
    backend: "PreTrainedTokenizerBase", conversation: list[dict[str, Any]], rendering: Rendering
) -> str:
    """The prompt text of a conversation.

    Raises:
        ValueError: the tokenizer has no chat template and none was given.
    """
    if rendering.chat_template is None and not backend.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: pass chat_template=…, or use generate with text"
        )
    text = backend.apply_chat_template(
        conversation,
        tools=None if rendering.tools is None else [*rendering.tools],
        chat_template=rendering.chat_template,
        add_generation_prompt=rendering.add_generation_prompt,
        continue_final_message=rendering.continue_final_message,
        tokenize=False,
        **(rendering.chat_template_kwargs or {}),
    )
    assert isinstance(text, str)
    return text


def _conversation(conversation: object) -> Sequence[Any]:
    if isinstance(conversation, str | Mapping) or not isinstance(conversation, Sequence):
        raise TypeError(
            f"messages holds a {type(conversation).__name__}: it must be a list of "
            "{'role': …, 'content': …} dicts, or a list of such lists"
        )
    if not conversation:
        raise ValueError("a conversation is empty: give at least one message")
    return conversation


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"a message is a {type(message).__name__}: it must be a dict with 'role' and 'content'"
        )
    if "role" not in message:
        raise ValueError(f"the message {dict(message)!r} has no 'role': add one, such as 'user'")
    content = message.get("content")
    return {**message, "content": _joined(content)} if isinstance(content, list) else {**message}


def _joined(parts: list[Any]) -> str:
    """Text of a message given in OpenAI's parts, a line each."""
    for part in parts:
        if not isinstance(part, str) and part.get("type") != "text":
            raise NotImplementedError(
                f"a message part of type {part.get('type')!r} is not built yet: only text is read"
            )
    return "\n".join(part if isinstance(part, str) else part["text"] for part in parts)
