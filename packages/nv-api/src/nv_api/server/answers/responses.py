"""Response answers: the items of /v1/responses, streamed or whole.

Owns their shape, and the order of the events. `nv_api.said` finds the parts of a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from nv_api.outputs import CompletionOutput
from nv_api.said import Arguments, CallBegun, CallEnded, Content, Event, Speech, Thought
from nv_api.server.errors import SERVER, ApiError
from nv_api.server.generation import Usage
from nv_api.server.message_tokens import MessageTokens
from nv_api.server.probabilities import TokenNames, chat_logprobs
from nv_api.server.protocol.fields import Json
from nv_api.server.sse import named_event

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
"""Statuses of responses; items have the first three."""


@dataclass(frozen=True, kw_only=True)
class ResponseForm:
    """The facts of a response that are known from the beginning.

    Attributes:
        name: a part of the ids of the response and its items.
        fields: those that repeat the request.
        speech: reads the answer.
        num_top: most likely tokens beside each; None: no log-probabilities.
        names: of tokens.
        messages: finds the message of each token; of use where there are log-probabilities.
    """

    name: str
    fields: Json
    speech: Speech
    num_top: int | None
    names: TokenNames
    messages: MessageTokens

    def response(
        self,
        status: str,
        output: Sequence[Json] = (),
        usage: Usage | None = None,
        error: ApiError | None = None,
    ) -> Json:
        """The response as it stands."""
        is_cut = status == INCOMPLETE
        return {
            "id": f"resp_{self.name}",
            "object": "response",
            "status": status,
            "error": None if error is None else {"code": SERVER, "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(output),
            "usage": None if usage is None else _usage(usage),
            **self.fields,
        }


class ResponseEvents:
    """The events of a streamed response.

    Args:
        form: what the response has.
    """

    closing = b""

    def __init__(self, form: ResponseForm) -> None:
        self._form = form
        self._progress = _Progress(form)
        self._num_events = 0

    def push(self, number: int, delta: CompletionOutput) -> bytes:  # one prompt
        """The events of a delta."""
        begins = self._begin() if self._num_events == 0 else []
        return self._numbered([*begins, *self._progress.push(delta)])

    def end(self, usage: Usage) -> bytes:
        """The event that has the whole response."""
        status = self._progress.status
        whole = self._form.response(status, self._progress.items, usage)
        return self._numbered([{"type": f"response.{status}", "response": whole}])

    def fail(self, error: ApiError) -> bytes:
        """The event that has what is there of the response, and the error."""
        begins = self._begin() if self._num_events == 0 else []
        broken = self._form.response(FAILED, self._progress.items, error=error)
        return self._numbered([*begins, {"type": "response.failed", "response": broken}])

    def _begin(self) -> list[Json]:
        begun = self._form.response(IN_PROGRESS)
        return [
            {"type": f"response.{name}", "response": begun} for name in ("created", IN_PROGRESS)
        ]

    def _numbered(self, events: list[Json]) -> bytes:
        """Events in the form that they are sent in."""
        sent: list[bytes] = []
        for each in events:
            each["sequence_number"] = self._num_events
            self._num_events += 1
            sent.append(named_event(each["type"], each))
        return b"".join(sent)


class ResponseWhole:
    """A response in one piece.

    Args:
        form: what the response has.
    """

    def __init__(self, form: ResponseForm) -> None:
        self._form = form
        self._progress = _Progress(form)

    def push(self, number: int, delta: CompletionOutput) -> None:  # one prompt
        """Add a delta."""
        self._progress.push(delta)

    async def body(self, usage: Usage) -> bytes:
        """The response as JSON."""
        return orjson.dumps(self._form.response(self._progress.status, self._progress.items, usage))


class _Item(Protocol):
    """An item that is not over."""

    def begin(self) -> list[Json]:
        """Its first events."""

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        """The event of a text that follows, with the log-probabilities of its tokens."""

    def end(self, status: str) -> list[Json]:
        """Its last events; the last one has the item."""


class _Progress:
    """The items of a response, as far as they have come."""

    def __init__(self, form: ResponseForm) -> None:
        self._form = form
        self._open: _Item | None = None
        self._open_kind: type[Event] | None = None
        self._num_messages = 0
        """Those that have begun."""
        self.items: list[Json] = []
        self.status = IN_PROGRESS

    def push(self, delta: CompletionOutput) -> list[Json]:
        """Add a delta; returns the events that show it, without their numbers."""
        form = self._form
        if form.num_top is not None:
            entries = chat_logprobs(delta.logprobs or [], form.num_top, form.names)
            form.messages.push(delta.token_ids, entries)
        shown = self._read(form.speech.push(delta.text))
        if delta.finish_reason is not None:
            ending = form.speech.finish(delta.finish_reason)
            form.messages.finish()
            self.status = INCOMPLETE if ending.finish_reason == "length" else COMPLETED
            shown += self._read(ending.events)
            shown += self._close(self.status)
        return shown

    def _read(self, events: list[Event]) -> list[Json]:
        """The events of the stream for what was found in the text."""
        shown: list[Json] = []
        for event in events:
            match event:
                case Thought(text) | Content(text):
                    if self._open_kind is not type(event):
                        shown += self._begin(event)
                    is_thought = isinstance(event, Thought)
                    shown += self._added(text, [] if is_thought else self._taken())
                case CallBegun():
                    shown += self._begin(event)
                case Arguments(_, text):
                    shown += self._added(text, [])
                case CallEnded(_, is_whole):
                    shown += self._close(COMPLETED if is_whole else INCOMPLETE)
        return shown

    def _begin(self, event: Thought | Content | CallBegun) -> list[Json]:
        shown = self._close(COMPLETED)
        place = len(self.items)
        name = f"{self._form.name}_{place}"
        match event:
            case Thought():
                self._open = _TextItem(THOUGHT, name, place)
            case Content():
                self._open = _TextItem(ANSWER, name, place)
                self._num_messages += 1
            case CallBegun():
                self._open = _CallItem(event, name, place)
        self._open_kind = type(event)
        return shown + self._open.begin()

    def _added(self, text: str, logprobs: list[Json]) -> list[Json]:
        assert self._open is not None
        return self._open.add(text, logprobs)

    def _taken(self) -> list[Json]:
        """The log-probabilities of the newest message that are not sent yet."""
        return self._form.messages.take(self._num_messages - 1)

    def _close(self, status: str) -> list[Json]:
        if self._open is None:
            return []
        shown: list[Json] = []
        if self._open_kind is Content and (rest := self._taken()):
            shown += self._added("", rest)  # tokens without a text
        shown += self._open.end(status)
        self._open = self._open_kind = None
        self.items.append(shown[-1]["item"])
        return shown


class _TextKind(NamedTuple):
    """A kind of item that is a text."""

    prefix: str
    """Of its id."""
    fields: Json
    """That all items of this kind have."""
    part: str
    """The type of its part, which is a part of the names of its events."""
    has_logprobs: bool
    """Its events and its part have a list of them."""


THOUGHT = _TextKind("rs", {"type": "reasoning", "summary": []}, "reasoning_text", False)
ANSWER = _TextKind("msg", {"type": "message", "role": "assistant"}, "output_text", True)


class _TextItem:
    """A thought or a message."""

    def __init__(self, kind: _TextKind, name: str, place: int) -> None:
        self._kind = kind
        self._id = f"{kind.prefix}_{name}"
        self._output_index = place
        self._place = {"item_id": self._id, "output_index": place, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[Json] = []

    def begin(self) -> list[Json]:
        """The item, and its only part."""
        return [
            self._of_item("added", IN_PROGRESS, []),
            {"type": "response.content_part.added", **self._place, "part": self._part("")},
        ]

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        """A delta of the text."""
        self._texts.append(text)
        self._logprobs += logprobs
        delta = {"type": f"response.{self._kind.part}.delta", **self._place, "delta": text}
        return [delta | self._more(logprobs)]

    def end(self, status: str) -> list[Json]:
        """The whole text, part and item."""
        kind, text = self._kind, "".join(self._texts)
        part = self._part(text)
        return [
            {
                "type": f"response.{kind.part}.done",
                **self._place,
                "text": text,
                **self._more(self._logprobs),
            },
            {"type": "response.content_part.done", **self._place, "part": part},
            self._of_item("done", status, [part]),
        ]

    def _part(self, text: str) -> Json:
        part = {"type": self._kind.part, "text": text, **self._more([*self._logprobs])}
        return part | {"annotations": []} if self._kind.has_logprobs else part

    def _more(self, logprobs: list[Json]) -> Json:
        return {"logprobs": logprobs} if self._kind.has_logprobs else {}

    def _of_item(self, what: str, status: str, content: list[Json]) -> Json:
        item = {"id": self._id, **self._kind.fields, "status": status, "content": content}
        return _item_event(what, self._output_index, item)


class _CallItem:
    """A call of a function."""

    def __init__(self, call: CallBegun, name: str, place: int) -> None:
        self._call = call
        self._id = f"fc_{name}"
        self._output_index = place
        self._place = {"item_id": self._id, "output_index": place}
        self._texts: list[str] = []

    def begin(self) -> list[Json]:
        """The item without its arguments."""
        return [self._of_item("added", IN_PROGRESS, "")]

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:  # a call has none
        """A delta of the arguments."""
        self._texts.append(text)
        return [{"type": "response.function_call_arguments.delta", **self._place, "delta": text}]

    def end(self, status: str) -> list[Json]:
        """The whole arguments and the item."""
        arguments = "".join(self._texts)
        done = {"type": "response.function_call_arguments.done", **self._place}
        return [
            {**done, "name": self._call.name, "arguments": arguments},
            self._of_item("done", status, arguments),
        ]

    def _of_item(self, what: str, status: str, arguments: str) -> Json:
        item = {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": arguments,
        }
        return _item_event(what, self._output_index, item)


def _item_event(what: str, place: int, item: Json) -> Json:
    return {"type": f"response.output_item.{what}", "output_index": place, "item": item}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
