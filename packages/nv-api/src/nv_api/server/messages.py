"""Messages: a conversation of OpenAI's, as chat templates expect it.

Owns the roles that templates do not know, and where system messages stand.
"""

from typing import Any

from nv_engine.values import shown

from nv_api.conversation import conversation_list
from nv_api.prompts import TokenPrompt
from nv_api.server.errors import invalid, refusals, unsupported
from nv_api.server.protocol.fields import Json

SYSTEM_ROLES = ("system", "developer")


def conversation(messages: list[Json]) -> list[Json]:
    """Messages that a template reads.

    A developer's message is a system message, for templates that do not know the role may drop it.
    The system messages at the beginning become one, their texts joined by an empty line.

    Raises:
        ApiError: 400, a message has no role or a content that is not text.
    """
    if not messages:
        raise invalid("messages is []: give at least one message", "messages")
    for index, message in enumerate(messages):
        if message.get("audio") is not None:
            raise unsupported(
                f"messages.{index}.audio is not built yet: only text is read",
                f"messages.{index}.audio",
            )
    with refusals("messages"):
        (checked,) = conversation_list([_message(each) for each in messages])
    return _joined(checked)


def check_no_template(given: object) -> None:
    """Refuse a request's own template.

    Raises:
        ApiError: 400, it has one.
    """
    if given is not None:
        raise unsupported(
            "chat_template is not taken from a request: a template is a program, so start the "
            "server with --chat-template",
            "chat_template",
        )


def check_rendered(messages: list[Json], prompt: TokenPrompt) -> None:
    """Check that a template has not dropped a system message that comes late.

    Raises:
        ApiError: 400, it has.
    """
    for index, message in enumerate(messages[1:], 1):
        text = str(message["content"]).strip()
        if message["role"] == "system" and text not in (prompt.text or ""):
            raise invalid(
                f"the chat template drops the system message {shown(text)} at place {index}: put "
                "it at the beginning",
                "messages",
            )


def _message(message: Json) -> Json:
    """One message, with the names that templates read."""
    named: Json = dict(message)
    if named.get("role") in SYSTEM_ROLES:
        named["role"] = "system"
    if named.get("content") is None and isinstance(refusal := named.get("refusal"), str):
        named["content"] = refusal
    thoughts: Any = named.get("reasoning_content") or named.get("reasoning")
    if thoughts is not None:  # one template reads the one, another the other
        named["reasoning_content"] = named["reasoning"] = thoughts
        named["content"] = named.get("content") or ""  # it was cut before its answer began
    return {key: value for key, value in named.items() if value is not None or key == "content"}


def _joined(messages: list[Json]) -> list[Json]:
    """The messages, those of the system at the beginning as one."""
    num_leading = next(
        (i for i, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    if num_leading < 2:
        return messages
    text = "\n\n".join(str(message["content"]) for message in messages[:num_leading])
    return [{**messages[0], "content": text}, *messages[num_leading:]]
