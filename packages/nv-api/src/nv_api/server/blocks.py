"""Blocks: the messages of /v1/messages as those of a chat.

Owns which blocks become a message of their own: each result of a tool does.
"""

from typing import Any

from nv_engine.values import shown

from nv_api.server.errors import invalid, unsupported
from nv_api.server.protocol.fields import Json

ROLES = ("user", "assistant", "system")
Content = str | list[Json]


def messages_of(messages: list[Json], system: Content | None) -> list[Json]:
    """The messages of a request, the system's first.

    Raises:
        ApiError: 400, a message or a block is wrong, or of a kind that is not built.
    """
    if not messages:
        raise invalid("messages is []: give at least one message", "messages")
    found: list[Json] = []
    if isinstance(system, list):
        system = [_only_text(block, f"system.{index}") for index, block in enumerate(system)]
    if system:
        found.append({"role": "system", "content": system})
    for index, message in enumerate(messages):
        place = f"messages.{index}"
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise invalid(
                f"{place}.role is {shown(role)}: it must be one of {', '.join(ROLES)}",
                f"{place}.role",
            )
        if not isinstance(content, str | list):
            raise invalid(
                f"{place}.content is {shown(content)}: it must be a text or a list of blocks",
                f"{place}.content",
            )
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif role == "assistant":
            found.append(_answer(content, f"{place}.content"))
        else:
            found += _question(role, content, f"{place}.content")
    return found


def is_begun(messages: list[Json]) -> bool:
    """Whether the last message is the beginning of the answer: a text of the assistant's."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _question(role: str, blocks: list[Any], place: str) -> list[Json]:
    """The messages of a user's blocks."""
    found: list[Json] = []
    parts: list[Json] = []
    for index, block in enumerate(blocks):
        kind = _kind(block, f"{place}.{index}")
        if kind == "text":
            parts.append(_text(block, "text", f"{place}.{index}"))
        elif kind == "tool_result":
            if parts:
                found.append({"role": role, "content": parts})
                parts = []
            found.append(_result(block, f"{place}.{index}"))
        else:
            raise _unbuilt(kind, f"{place}.{index}", "text and tool_result")
    if parts or not found:
        found.append({"role": role, "content": parts})
    return found


def _result(block: Json, place: str) -> Json:
    """The message of a tool's result."""
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise invalid(
            f"{place}.tool_use_id is {shown(call_id)}: it must be the id of a tool_use block",
            f"{place}.tool_use_id",
        )
    content = block.get("content")
    if isinstance(content, list):
        content = [_only_text(each, f"{place}.content.{i}") for i, each in enumerate(content)]
    elif not isinstance(content, str | None):
        raise invalid(
            f"{place}.content is {shown(content)}: it must be a text or a list of blocks",
            f"{place}.content",
        )
    return {"role": "tool", "tool_call_id": call_id, "content": content or ""}


def _answer(blocks: list[Any], place: str) -> Json:
    """The message of an assistant's blocks."""
    parts: list[Json] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(blocks):
        where = f"{place}.{index}"
        kind = _kind(block, where)
        if kind == "text":
            parts.append(_text(block, "text", where))
        elif kind == "thinking":
            thoughts.append(_text(block, "thinking", where)["text"])
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise invalid(
                    f"{where}.input is {shown(block.get('input'))}: it must be an object",
                    f"{where}.input",
                )
            call_id = _text(block, "id", where)["text"]
            function = {"name": block.get("name"), "arguments": block["input"]}
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind != "redacted_thinking":  # nothing of it can be read
            raise _unbuilt(kind, where, "text, thinking and tool_use")
    message: Json = {"role": "assistant", "content": parts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _only_text(block: Any, place: str) -> Json:  # noqa: ANN401
    kind = _kind(block, place)
    if kind != "text":
        raise _unbuilt(kind, place, "text")
    return _text(block, "text", place)


def _kind(block: Any, place: str) -> Any:  # noqa: ANN401
    """The type of a block."""
    if not isinstance(block, dict):
        raise invalid(f"{place} is {shown(block)}: it must be an object", place)
    return block.get("type")


def _text(block: Json, name: str, place: str) -> Json:
    """The part of a message that a block with a text is."""
    text = block.get(name)
    if not isinstance(text, str):
        raise invalid(f"{place}.{name} is {shown(text)}: it must be a text", f"{place}.{name}")
    return {"type": "text", "text": text}


def _unbuilt(kind: object, place: str, built: str) -> Exception:
    return unsupported(f"{place}.type is {shown(kind)}: only {built} are built", f"{place}.type")
