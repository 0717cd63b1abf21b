"""Conversations: messages in, the prompt text of the checkpoint's chat template out.

Owns how messages are checked and rendered; the template itself is the tokenizer's.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]

TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the expressions of a template raise; jinja passes them on as they are."""

FORMS = "a list of {'role': …, 'content': …} dicts, or a list of such lists"


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """How a conversation becomes a prompt; names as `LLM.chat`.

    Raises:
        ValueError: a prompt that both opens a new message and continues the last one.
        TypeError: a field of another type.
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
        if not isinstance(self.chat_template, str | None):
            raise TypeError(f"chat_template is {self.chat_template!r}: it must be a Jinja template")
        if not isinstance(self.chat_template_kwargs, Mapping | None):
            raise TypeError(
                f"chat_template_kwargs is {self.chat_template_kwargs!r}: it must be a dict"
            )
        tools = self.tools or ()
        if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
            raise TypeError(f"tools is {tools!r}: it must be a list of JSON schemas, each a dict")


def conversation_list(messages: object) -> list[list[dict[str, Any]]]:
    """One conversation or several, as a list of conversations.

    Raises:
        TypeError: something that is no conversation or no message.
        ValueError: an empty conversation, or a message without a role or a content.
        NotImplementedError: a content that is not text.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        hint = ": put the message in a list" if isinstance(messages, Mapping) else ""
        raise TypeError(f"messages is a {type(messages).__name__}: it must be {FORMS}{hint}")
    single = bool(messages) and isinstance(messages[0], Mapping)
    conversations = [messages] if single else messages
    return [[_message(message) for message in _conversation(c)] for c in conversations]


def render(
    backend: "PreTrainedTokenizerBase", conversation: list[dict[str, Any]], rendering: Rendering
) -> str:
    """The prompt text of a conversation.

    Raises:
        ValueError: the tokenizer has no chat template and none was given, the template refuses
            the conversation, or `chat_template_kwargs` has what is not the template's.
    """
    if rendering.chat_template is None and not backend.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: pass chat_template=…, or use generate with text"
        )
    more = rendering.chat_template_kwargs or {}
    _check_names(backend, more)
    try:
        text = backend.apply_chat_template(
            conversation,
            tools=None if rendering.tools is None else [*rendering.tools],
            chat_template=rendering.chat_template,
            add_generation_prompt=rendering.add_generation_prompt,
            continue_final_message=rendering.continue_final_message,
            tokenize=False,
            **more,
        )
    except TemplateError as error:
        raise ValueError(f"the chat template does not take the conversation: {error}") from error
    except TEMPLATE_ERRORS as error:
        raise ValueError(
            f"the chat template failed on these messages ({type(error).__name__}: {error}): mend "
            "it, or pass another as chat_template=…"
        ) from error
    assert isinstance(text, str)
    return text


def _check_names(backend: "PreTrainedTokenizerBase", given: Mapping[str, Any]) -> None:
    """Refuse names that would turn the rendering into something else than a text."""
    taken = {"messages", *inspect.signature(backend.apply_chat_template).parameters} - {"documents"}
    for name in given:
        if not isinstance(name, str) or name in taken:
            raise ValueError(
                f"chat_template_kwargs has {name!r}, which is no variable of the template: take it "
                "out, or pass it to chat itself if that has it"
            )


def _conversation(conversation: object) -> Sequence[Any]:
    if isinstance(conversation, str | Mapping) or not isinstance(conversation, Sequence):
        raise TypeError(f"messages holds a {type(conversation).__name__}: it must be {FORMS}")
    if not conversation:
        raise ValueError("a conversation is empty: give at least one message")
    return conversation


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"a message is a {type(message).__name__}: it must be a dict with 'role' and 'content'"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        said = f"the role {role!r}" if "role" in message else "no 'role'"
        raise ValueError(f"the message {dict(message)!r} has {said}: give one, such as 'user'")
    if content is None and message.get("tool_calls"):
        content = ""  # OpenAI's way: what the assistant called stands in for what it said
    if content is None:
        raise ValueError(f"the message {dict(message)!r} has no 'content': give it a text")
    return {**message, "content": _text(content)}


def _text(content: object) -> str:
    """Text of a message, which may be given in OpenAI's parts: then a line each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TypeError(f"a message's content is {content!r}: it must be a text or a list of parts")
    return "\n".join(map(_part, content))


def _part(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") != "text":
        raise NotImplementedError(
            f"a message part of type {part['type']!r} is not built yet: only text is read"
        )
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise TypeError(
            f"a message part is {part!r}: it must be a text, or {{'type': 'text', 'text': …}}"
        )
    return text
