"""Completion answers: the texts of /v1/completions, streamed or whole.

Owns their shape, and the echo of a prompt.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from nv_api.outputs import CompletionOutput
from nv_api.request import Request
from nv_api.server.answers.form import EndsWithDone, Head
from nv_api.server.generation import Usage
from nv_api.server.probabilities import CompletionColumns, TokenNames, prompt_logprobs
from nv_api.server.sse import event

KIND = "text_completion"
MANY = 64
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(frozen=True, kw_only=True)
class CompletionForm:
    """The parts of completions, whether they are streamed or not.

    Attributes:
        head: the fields that begin every object.
        names: of tokens.
        has_logprobs: of the drawn tokens, and with `is_echo` of the prompt's.
        shows_prompt_logprobs: choices have vLLM's field of that name.
        is_echo: a text begins with its prompt.
        is_only_echo: and ends there (max_tokens 0).
        num_choices: n, of each prompt.
    """

    head: Head
    names: TokenNames
    has_logprobs: bool
    shows_prompt_logprobs: bool
    is_echo: bool
    is_only_echo: bool
    num_choices: int

    def usage(self, usage: Usage) -> Usage:
        """The tokens that are shown."""
        return replace(usage, completion_tokens=0) if self.is_only_echo else usage


@dataclass
class Piece:
    """The part of a completion that is new."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Choices:
    """The completions of all prompts: `index` is prompt times n plus the completion's own.

    Args:
        form: what they have.
        requests: the prompts in flight.
    """

    def __init__(self, form: CompletionForm, requests: Sequence[Request]) -> None:
        self._form = form
        self._requests = requests
        self._columns = [
            CompletionColumns(form.names) for _ in range(len(requests) * form.num_choices)
        ]
        self._has_begun = [False] * len(self._columns)

    def __len__(self) -> int:
        """Of all prompts."""
        return len(self._columns)

    def index(self, number: int, delta: CompletionOutput) -> int:
        """The place of a completion of prompt `number`."""
        return number * self._form.num_choices + delta.index

    def piece(self, number: int, delta: CompletionOutput) -> Piece:
        """The new part; of the first piece of an echo, the prompt too."""
        index = self.index(number, delta)
        piece = Piece(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        if self._form.is_echo and not self._has_begun[index]:
            self._add_prompt(piece, index, self._requests[number])
        self._has_begun[index] = True
        if self._form.is_only_echo:
            if piece.finish_reason is not None:
                piece.finish_reason, piece.stop_reason = "length", None
            return piece
        piece.text += delta.text
        piece.token_ids += delta.token_ids
        if self._form.has_logprobs:
            found = self._columns[index].columns(delta.token_ids, delta.logprobs or [])
            piece.logprobs = _joined(piece.logprobs, found)
        return piece

    def _add_prompt(self, piece: Piece, index: int, request: Request) -> None:
        token_ids = request.prompt.token_ids
        piece.text = request.prompt.text if request.prompt.text is not None else self._text(request)
        if self._form.has_logprobs:
            positions = request.prompt_logprobs or [None] * len(token_ids)
            piece.logprobs = self._columns[index].columns(token_ids, positions)

    def _text(self, request: Request) -> str:
        """The text of a prompt that was given as ids."""
        tokenizer = self._form.names.tokenizer
        return "" if tokenizer is None else tokenizer.decode(request.prompt.token_ids)


class CompletionEvents(EndsWithDone):
    """The events of streamed completions.

    Args:
        form: what they have.
        requests: the prompts in flight.
        usage: returns the usage so far.
    """

    def __init__(
        self, form: CompletionForm, requests: Sequence[Request], usage: Callable[[], Usage]
    ) -> None:
        self._form = form
        self._requests = requests
        self._usage = usage
        self._head = form.head.fields(KIND)
        self._choices = Choices(form, requests)
        self._num_choices = form.num_choices
        self._has_ids = [not form.head.has_token_ids] * len(self._choices)
        is_plain = not (
            form.has_logprobs
            or form.is_echo
            or form.head.has_token_ids
            or form.head.has_running_usage
        )
        self._prefixes = [self._prefix(i) for i in range(len(self._choices))] if is_plain else None
        usage_field = b',"usage":null' if form.head.has_usage else b""
        self._suffix = b',"logprobs":null,"finish_reason":null}]' + usage_field + b"}\n\n"

    def push(self, number: int, delta: CompletionOutput) -> bytes:
        """The events of a delta: its text and its end."""
        if self._prefixes is None:
            return self._full(number, delta)
        index = number * self._num_choices + delta.index
        text, reason = delta.text, delta.finish_reason
        events = self._prefixes[index] + orjson.dumps(text) + self._suffix if text else b""
        return events if reason is None else events + self._end(index, reason, delta.stop_reason)

    def end(self, usage: Usage) -> bytes:
        """The chunk with the usage, if it was asked for."""
        if not self._form.head.has_usage:
            return b""
        return event({**self._head, "choices": [], "usage": self._form.usage(usage).fields})

    def _full(self, number: int, delta: CompletionOutput) -> bytes:
        """The same, with everything that was asked for."""
        index = self._choices.index(number, delta)
        piece = self._choices.piece(number, delta)
        events = b""
        if piece.text or piece.logprobs or (self._form.head.has_token_ids and piece.token_ids):
            choice: dict[str, Any] = {
                "index": index,
                "text": piece.text,
                "logprobs": piece.logprobs,
                "finish_reason": None,
            }
            if self._form.head.has_token_ids:
                choice["token_ids"] = piece.token_ids
            if not self._has_ids[index]:
                self._has_ids[index] = True
                choice["prompt_token_ids"] = self._requests[number].prompt.token_ids
            events = self._event(choice)
        if piece.finish_reason is not None:
            events += self._end(index, piece.finish_reason, piece.stop_reason)
        return events

    def _end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        return self._event(
            {
                "index": index,
                "text": "",
                "logprobs": None,
                "finish_reason": finish_reason,
                "stop_reason": stop_reason,
            }
        )

    def _event(self, choice: dict[str, Any]) -> bytes:
        more: dict[str, Any] = {}
        if self._form.head.has_running_usage:
            more["usage"] = self._form.usage(self._usage()).fields
        elif self._form.head.has_usage:
            more["usage"] = None
        return event({**self._head, "choices": [choice], **more})

    def _prefix(self, index: int) -> bytes:
        """An event up to its text, made once."""
        head = orjson.dumps(self._head)[:-1]
        return b"data: %s,%s" % (head, b'"choices":[{"index":%d,"text":' % index)


class CompletionWhole:
    """Completions in one piece.

    Args:
        form: what they have.
        requests: the prompts in flight.
    """

    def __init__(self, form: CompletionForm, requests: Sequence[Request]) -> None:
        self._form = form
        self._requests = requests
        self._choices = Choices(form, requests)
        self._pieces: list[list[Piece]] = [[] for _ in range(len(self._choices))]

    def push(self, number: int, delta: CompletionOutput) -> None:
        """Add a delta."""
        index = self._choices.index(number, delta)
        self._pieces[index].append(self._choices.piece(number, delta))

    async def body(self, usage: Usage) -> bytes:
        """The response as JSON; that of many choices is made beside the event loop."""
        if len(self._choices) < MANY:
            return self._body(usage)
        return await asyncio.to_thread(self._body, usage)

    def _body(self, usage: Usage) -> bytes:
        choices = [self._fields(index, pieces) for index, pieces in enumerate(self._pieces)]
        head = self._form.head.fields(KIND)
        return orjson.dumps({**head, "choices": choices, "usage": self._form.usage(usage).fields})

    def _fields(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        logprobs: dict[str, list[Any]] | None = None
        for piece in pieces:
            logprobs = _joined(logprobs, piece.logprobs)
        found: dict[str, Any] = {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": logprobs,
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }
        request = self._requests[index // self._form.num_choices]
        if self._form.head.has_token_ids:
            found["token_ids"] = [token for piece in pieces for token in piece.token_ids]
            found["prompt_token_ids"] = request.prompt.token_ids
        if self._form.shows_prompt_logprobs:
            found["prompt_logprobs"] = prompt_logprobs(request.prompt_logprobs or [])
        return found


def _joined(
    before: dict[str, list[Any]] | None, after: dict[str, list[Any]] | None
) -> dict[str, list[Any]] | None:
    """Columns, longer by others; None stands for none."""
    if before is None or after is None:
        return after if before is None else before
    for name in COLUMNS:
        before[name] += after[name]
    return before
