"""Message answers: the blocks of /v1/messages, streamed or whole.

Owns their shape, and the order of the events. `nv_api.said` finds the parts of a text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import orjson
from pydantic_core import from_json

from nv_api.outputs import CompletionOutput
from nv_api.said import Arguments, CallBegun, CallEnded, Content, Event, Speech, Thought
from nv_api.server.envelopes import anthropic_envelope
from nv_api.server.errors import ApiError
from nv_api.server.generation import Usage
from nv_api.server.protocol.fields import Json
from nv_api.server.sse import named_event

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True, kw_only=True)
class MessageForm:
    """The facts of an answer that are known from the beginning.

    Attributes:
        request_id: of HTTP; a part of the answer's id.
        model: the name that the client used.
        speech: reads the answer.
    """

    request_id: str
    model: str
    speech: Speech

    def message(self, usage: Usage, content: list[Json], stop: Json) -> Json:
        """The answer as it stands."""
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stop,
            "usage": _usage(usage),
        }


class MessageEvents:
    """The events of a streamed answer.

    Args:
        form: what the answer has.
        usage: returns the usage so far.
    """

    closing = b""

    def __init__(self, form: MessageForm, usage: Callable[[], Usage]) -> None:
        self._form = form
        self._usage = usage
        self._progress = _Progress(form.speech)
        self._has_begun = False

    def push(self, number: int, delta: CompletionOutput) -> bytes:  # one prompt
        """The events of a delta."""
        return _sent([*self._begin(), *self._progress.push(delta)])

    def end(self, usage: Usage) -> bytes:
        """The reason for the end, and the usage."""
        ending = {"type": "message_delta", "delta": self._progress.stop, "usage": _usage(usage)}
        return _sent([ending, {"type": "message_stop"}])

    def fail(self, error: ApiError) -> bytes:
        """The error, after which nothing comes."""
        return _sent([*self._begin(), anthropic_envelope(error, self._form.request_id)])

    def _begin(self) -> list[Json]:
        """The first event, once."""
        if self._has_begun:
            return []
        self._has_begun = True
        message = self._form.message(self._usage(), [], self._progress.stop)
        message["usage"]["output_tokens"] = 0
        return [{"type": "message_start", "message": message}]


class MessageWhole:
    """An answer in one piece.

    Args:
        form: what the answer has.
    """

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._progress = _Progress(form.speech)

    def push(self, number: int, delta: CompletionOutput) -> None:  # one prompt
        """Add a delta."""
        self._progress.push(delta)

    async def body(self, usage: Usage) -> bytes:
        """The answer as JSON."""
        progress = self._progress
        return orjson.dumps(self._form.message(usage, progress.blocks, progress.stop))


class _Block(Protocol):
    """A block that is not over."""

    def begin(self) -> Json:
        """The block without its text."""

    def delta(self, text: str) -> Json:
        """A text that follows."""

    def last_deltas(self, text: str) -> list[Json]:
        """The events after the whole text."""

    def whole(self, text: str) -> Json:
        """The block with its whole text."""


class _Progress:
    """The blocks of an answer, as far as they have come."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        self._open: _Block | None = None
        self._texts: list[str] = []
        self.blocks: list[Json] = []
        self.stop: Json = {"stop_reason": None, "stop_sequence": None}

    def push(self, delta: CompletionOutput) -> list[Json]:
        """Add a delta; returns the events that show it."""
        shown = self._read(self._speech.push(delta.text))
        if delta.finish_reason is not None:
            ending = self._speech.finish(delta.finish_reason)
            shown += self._read(ending.events)
            shown += self._close()
            self.stop = _stop(ending.finish_reason, delta.stop_reason)
        return shown

    def _read(self, events: list[Event]) -> list[Json]:
        """The events of the stream for what was found in the text."""
        shown: list[Json] = []
        for event in events:
            match event:
                case Content(text):
                    if not isinstance(self._open, _Text):
                        shown += self._begin(_Text())
                    shown.append(self._add(text))
                case Thought(text):
                    if not isinstance(self._open, _Thinking):
                        shown += self._begin(_Thinking())
                    shown.append(self._add(text))
                case CallBegun(_, call_id, name):
                    shown += self._begin(_ToolUse(call_id, name))
                case Arguments(_, text):
                    shown.append(self._add(text))
                case CallEnded():
                    shown += self._close()
        return shown

    def _begin(self, block: _Block) -> list[Json]:
        shown = self._close()
        self._open, self._texts = block, []
        place = len(self.blocks)
        begun = {"type": "content_block_start", "index": place, "content_block": block.begin()}
        return [*shown, begun]

    def _add(self, text: str) -> Json:
        assert self._open is not None
        self._texts.append(text)
        return self._delta(self._open.delta(text))

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        text = "".join(self._texts)
        shown = [self._delta(each) for each in self._open.last_deltas(text)]
        shown.append({"type": "content_block_stop", "index": len(self.blocks)})
        self.blocks.append(self._open.whole(text))
        self._open = None
        return shown

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}


class _Text:
    """A text of the answer."""

    def begin(self) -> Json:
        return self.whole("")

    def delta(self, text: str) -> Json:
        return {"type": "text_delta", "text": text}

    def last_deltas(self, text: str) -> list[Json]:
        return []

    def whole(self, text: str) -> Json:
        return {"type": "text", "text": text}


class _Thinking:
    """A thought. Its signature is a digest: some clients drop thoughts that have none."""

    def begin(self) -> Json:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def delta(self, text: str) -> Json:
        return {"type": "thinking_delta", "thinking": text}

    def last_deltas(self, text: str) -> list[Json]:
        return [{"type": "signature_delta", "signature": _signature(text)}]

    def whole(self, text: str) -> Json:
        return {"type": "thinking", "thinking": text, "signature": _signature(text)}


class _ToolUse:
    """A call of a tool."""

    def __init__(self, call_id: str, name: str) -> None:
        self._head = {
            "type": "tool_use",
            "id": f"toolu_{call_id.removeprefix('call_')}",
            "name": name,
        }

    def begin(self) -> Json:
        return {**self._head, "input": {}}

    def delta(self, text: str) -> Json:
        return {"type": "input_json_delta", "partial_json": text}

    def last_deltas(self, text: str) -> list[Json]:
        return []

    def whole(self, text: str) -> Json:
        return {**self._head, "input": _input(text)}


def _input(text: str) -> Json:
    """Arguments as an object; of those that were cut, the members that are whole.

    Anthropic's client reads a stream's arguments in the same way.
    """
    try:
        found: Any = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _signature(thought: str) -> str:
    return sha256(thought.encode("utf-8", "surrogatepass")).hexdigest()


def _stop(finish_reason: str, stop_reason: int | str | None) -> Json:
    """The reason for the end; a stop sequence's text, and not an end token's id, is shown."""
    if finish_reason != "length" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": STOP_REASONS[finish_reason], "stop_sequence": None}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _sent(events: list[Json]) -> bytes:
    """Events in the form that they are sent in."""
    return b"".join([named_event(each["type"], each) for each in events])
