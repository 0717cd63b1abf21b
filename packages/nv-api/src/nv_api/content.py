"""Content: the content of a message, as a text or as OpenAI's list of parts.

Owns the types of parts, and both forms. Never chooses the form: the chat template does.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from nv_engine.values import shown

from nv_api.template import ContentForm

TEXT_OF = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of parts that hold text, and the key of that text; as in vLLM."""

PART = "a text, or {'type': 'text', 'text': …}"


class Parts(list[dict[str, Any]]):
    """Parts of a message, each {"type": "text", "text": …}.

    `str()` joins their texts: a template may loop over the parts of one message and print the
    content of another.
    """

    def __str__(self) -> str:
        return "\n".join(part["text"] for part in self if part["text"])


Content: TypeAlias = str | Parts


def checked_content(content: object) -> Content:
    """Check a content that a user gave.

    Raises:
        TypeError: the content is neither a text nor a list of parts.
        NotImplementedError: a part that is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise TypeError(
            f"a message's content is {shown(content)}: it must be a text or a list of parts"
        )
    return Parts(map(_part, content))


def in_form(content: Content, form: ContentForm) -> Content:
    """The content in the form that a template reads."""
    if form == "string":
        return str(content)
    if form == "either":
        return content or ""
    return Parts([{"type": "text", "text": content}]) if isinstance(content, str) else content


def _part(part: object) -> dict[str, Any]:
    given = {"text": part} if isinstance(part, str) else part
    if not isinstance(given, Mapping):
        raise TypeError(f"a message part is {shown(part)}: it must be {PART}")
    kind = given.get("type", "text")
    if not isinstance(kind, str) or kind not in TEXT_OF:
        raise NotImplementedError(
            f"a message part of type {shown(kind)} is not built yet: only text is read"
        )
    text = given.get(TEXT_OF[kind])
    if not isinstance(text, str):
        raise TypeError(f"a message part is {shown(part)}: it must be {PART}")
    return {**given, "type": "text", "text": text}
