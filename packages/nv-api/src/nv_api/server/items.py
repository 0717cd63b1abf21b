"""Items: the input of /v1/responses as the messages of a chat.

Owns which items belong to one message: thoughts, a text and calls in a row are one turn of the
assistant. Never checks a content: `nv_api.conversation` does.
"""

from typing import Any

from nv_engine.values import shown

from nv_api.server.errors import invalid, unsupported
from nv_api.server.protocol.fields import Json

KINDS = "message, reasoning, function_call and function_call_output"


def messages_of(given: Any, instructions: str | None) -> list[Json]:  # noqa: ANN401  # checked here
    """The messages of a request.

    Args:
        given: a text, or a list of items.
        instructions: become a system message, which is the first.

    Raises:
        ApiError: 400, an item is wrong, or of a kind that is not built.
    """
    messages = _Messages()
    if instructions is not None:
        messages.add({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.add({"role": "user", "content": given})
    elif isinstance(given, list) and given:
        for index, item in enumerate(given):
            _add(item, f"input.{index}", messages)
    else:
        raise invalid(
            f"input is {shown(given)}: it must be a text or a list of items, and not empty", "input"
        )
    return messages.whole()


class _Messages:
    """Messages, of which the last one may be a turn of the assistant that goes on."""

    def __init__(self) -> None:
        self.found: list[Json] = []
        self._turn: Json | None = None

    def add(self, message: Json) -> None:
        """A message that is whole."""
        self._turn = None
        self.found.append(message)

    def turn(self, *later: str) -> Json:
        """The assistant's turn.

        Args:
            *later: fields that are not before what will be added: a turn that has one is over.
        """
        if self._turn is None or any(name in self._turn for name in later):
            self.add({"role": "assistant"})
            self._turn = self.found[-1]
        return self._turn

    def whole(self) -> list[Json]:
        """All of them; a turn without a text has an empty one."""
        return [{"content": "", **message} for message in self.found]


def _add(item: Any, place: str, messages: _Messages) -> None:  # noqa: ANN401
    """Add one item."""
    if not isinstance(item, dict):
        raise invalid(f"{place} is {shown(item)}: it must be an object", place)
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        _add_message(item, place, messages)
    elif kind == "reasoning":
        turn = messages.turn("reasoning_content", "content", "tool_calls")
        turn["reasoning_content"] = _thought(item, place)
    elif kind == "function_call":
        call_id, name = _text(item, "call_id", place), _text(item, "name", place)
        function = {"name": name, "arguments": _existing(item, "arguments", place)}
        call = {"id": call_id, "type": "function", "function": function}
        messages.turn().setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id = _text(item, "call_id", place)
        content = _existing(item, "output", place)
        messages.add({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "item_reference":
        raise unsupported(
            f"{place} refers to an item, and this server keeps none: send the item itself", place
        )
    else:
        raise unsupported(f"{place}.type is {shown(kind)}: only {KINDS} are built", f"{place}.type")


def _add_message(item: Json, place: str, messages: _Messages) -> None:
    role, content = _text(item, "role", place), _existing(item, "content", place)
    if role != "assistant":
        messages.add({"role": role, "content": content})
        return
    messages.turn("content", "tool_calls")["content"] = content


def _thought(item: Json, place: str) -> str:
    """The text of a reasoning item: its own, or else its summary."""
    for name in "content", "summary":
        if not isinstance(item.get(name), list | None):
            raise invalid(
                f"{place}.{name} is {shown(item[name])}: it must be a list of parts",
                f"{place}.{name}",
            )
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise invalid(f"{place} has a part without a text: give it one", place)
    return "\n".join(map(str, texts))


def _existing(item: Json, name: str, place: str) -> Any:  # noqa: ANN401
    value = item.get(name)
    if value is None:
        raise invalid(f"{place}.{name} is missing: give it", f"{place}.{name}")
    return value


def _text(item: Json, name: str, place: str) -> str:
    value = _existing(item, name, place)
    if not isinstance(value, str) or not value:
        raise invalid(
            f"{place}.{name} is {shown(value)}: it must be a text that is not empty",
            f"{place}.{name}",
        )
    return value
