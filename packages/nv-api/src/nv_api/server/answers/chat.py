"""Chat answers: the messages of /v1/chat/completions, streamed or whole.

Owns their shape. Never reads a text: a `Speech` finds the parts of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from nv_api.outputs import CompletionOutput
from nv_api.request import Request
from nv_api.said import Arguments, CallBegun, Content, Event, Speech, Thought
from nv_api.server.answers.form import EndsWithDone, Head
from nv_api.server.generation import Usage
from nv_api.server.probabilities import TokenNames, chat_logprobs, prompt_logprobs
from nv_api.server.sse import event

CHUNK, WHOLE = "chat.completion.chunk", "chat.completion"


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """The parts of a chat's answer, whether it is streamed or not.

    Attributes:
        head: the fields that begin every object.
        names: of tokens.
        num_top: most likely tokens beside each; None: no log-probabilities.
        new_speech: makes a reader of one completion's text.
        has_thoughts: thoughts are shown.
        reason_of_calls: the finish_reason of an answer with calls.
        num_choices: n.
    """

    head: Head
    names: TokenNames
    num_top: int | None
    new_speech: Callable[[], Speech]
    has_thoughts: bool
    reason_of_calls: str
    num_choices: int

    def logprobs(self, delta: CompletionOutput) -> list[dict[str, Any]] | None:
        """Of the tokens of a delta; None unless asked for."""
        if self.num_top is None:
            return None
        return chat_logprobs(delta.logprobs or [], self.num_top, self.names)

    def said(self, speech: Speech, delta: CompletionOutput) -> "Said":
        """The events of a delta but hidden thoughts, and the reason if it is the last."""
        events = speech.push(delta.text)
        reason = delta.finish_reason
        if reason is not None:
            last, reason = speech.finish(reason, self.reason_of_calls)
            events = events + last
        if not self.has_thoughts:
            events = [event for event in events if not isinstance(event, Thought)]
        return Said(events, reason)


class Said(NamedTuple):
    """The new part of an answer."""

    events: list[Event]
    finish_reason: str | None


def _fields(event: Event) -> dict[str, Any] | None:
    """The delta of an event; None if it has none."""
    match event:
        case Content(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegun(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None


@dataclass
class _Streamed:
    """One completion of a stream: what was sent of it."""

    speech: Speech
    has_begun: bool = False
    has_content: bool = False
    """Its content is a text: it was sent, even if it is empty."""
    has_more: bool = False
    """It has thoughts or calls."""


class ChatEvents(EndsWithDone):
    """The events of a streamed chat.

    Args:
        form: what the answer has.
        request: the prompt in flight.
        usage: returns the usage so far.
    """

    def __init__(self, form: ChatForm, request: Request, usage: Callable[[], Usage]) -> None:
        self._form = form
        self._request = request
        self._usage = usage
        self._head = form.head.fields(CHUNK)
        self._choices = [_Streamed(form.new_speech()) for _ in range(form.num_choices)]
        self._has_prompt_ids = not form.head.has_token_ids
        self._is_plain = form.num_top is None and not (
            form.head.has_token_ids or form.head.has_running_usage
        )
        self._prefixes = [self._prefix(i) for i in range(form.num_choices)]
        usage_field = b',"usage":null' if form.head.has_usage else b""
        self._suffix = b',"logprobs":null,"finish_reason":null}]' + usage_field + b"}\n\n"
        self._content_prefixes = [prefix + b'{"content":' for prefix in self._prefixes]
        self._content_suffix = b"}" + self._suffix

    def push(self, number: int, delta: CompletionOutput) -> bytes:  # one prompt
        """The events of a delta: its role if it is the first, its text, its end."""
        index, text = delta.index, delta.text
        choice = self._choices[index]
        if (  # nearly always
            choice.has_content
            and self._is_plain
            and delta.finish_reason is None
            and choice.speech.passes(text)
        ):
            return self._content(index, text) if text else b""
        said = self._form.said(choice.speech, delta)
        news = [fields for event in said.events if (fields := _fields(event)) is not None]
        events = self._news(delta, choice, news)
        if said.finish_reason is None:
            return events
        if not choice.has_begun:
            events += self._role(index, choice, [])
        elif not choice.has_content and not choice.has_more:
            events += self._chunk(index, {"content": ""})
        return events + self._end(delta, said.finish_reason)

    def end(self, usage: Usage) -> bytes:
        """The chunk with the usage, if it was asked for."""
        if not self._form.head.has_usage:
            return b""
        return event({**self._head, "choices": [], "usage": usage.fields})

    def _content(self, index: int, text: str) -> bytes:
        """The event of some content, where an event has nothing else."""
        return self._content_prefixes[index] + orjson.dumps(text) + self._content_suffix

    def _news(
        self, delta: CompletionOutput, choice: _Streamed, news: list[dict[str, Any]]
    ) -> bytes:
        """The events of what is new; b"" if there is nothing to show yet."""
        more: dict[str, Any] = {}
        if (logprobs := self._form.logprobs(delta)) is not None:
            more["logprobs"] = {"content": logprobs}
        if self._form.head.has_token_ids:
            more["token_ids"] = delta.token_ids
        if not news and (logprobs or more.get("token_ids")):
            news = [{}]  # tokens whose text is held back
        if not news:
            return b""
        first = b"" if choice.has_begun else self._role(delta.index, choice, news)
        for fields in news:
            if "content" in fields:
                choice.has_content = True
            elif fields:
                choice.has_more = True
        chunks = [self._chunk(delta.index, news[0], **more)]
        chunks += [self._chunk(delta.index, fields) for fields in news[1:]]
        return first + b"".join(chunks)

    def _role(self, index: int, choice: _Streamed, news: list[dict[str, Any]]) -> bytes:
        """The first event of a choice; its content is null while that may stay so."""
        choice.has_begun = True
        choice.has_content = not news or "content" in news[0]
        more: dict[str, Any] = {}
        if not self._has_prompt_ids:
            self._has_prompt_ids = True
            more["prompt_token_ids"] = self._request.prompt.token_ids
        delta = {"role": "assistant", "content": "" if choice.has_content else None}
        choice_fields = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(choice_fields, **more)

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:  # noqa: ANN401
        """An event with a delta."""
        if self._is_plain:
            return self._prefixes[index] + orjson.dumps(delta) + self._suffix
        fields = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._form.num_top is not None:
            fields["logprobs"] = {"content": []}
        if self._form.head.has_token_ids:
            fields["token_ids"] = []
        return self._event({**fields, **more})

    def _end(self, delta: CompletionOutput, finish_reason: str) -> bytes:
        return self._event(
            {
                "index": delta.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": finish_reason,
                "stop_reason": delta.stop_reason,
            }
        )

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:  # noqa: ANN401
        if self._form.head.has_running_usage:
            more["usage"] = self._usage().fields
        elif self._form.head.has_usage:
            more["usage"] = None
        return event({**self._head, "choices": [choice], **more})

    def _prefix(self, index: int) -> bytes:
        """An event up to its delta, made once."""
        head = orjson.dumps(self._head)[:-1]
        return b"data: %s,%s" % (head, b'"choices":[{"index":%d,"delta":' % index)


@dataclass
class _Choice:
    """One completion, as far as it has come."""

    speech: Speech
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list["_Call"] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: Event) -> None:
        """Add the next event of the text."""
        match event:
            case Content(text):
                self.texts.append(text)
            case Thought(text):
                self.thoughts.append(text)
            case CallBegun(_, call_id, name):
                self.calls.append(_Call(call_id, name))
            case Arguments(index, text):
                self.calls[index].arguments.append(text)

    def message(self, *, has_thoughts: bool) -> dict[str, Any]:
        """The whole message."""
        is_null = not self.texts and (self.thoughts or self.calls)
        content = None if is_null else "".join(self.texts)
        found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if has_thoughts:
            thoughts = "".join(self.thoughts) or None
            found |= {"reasoning_content": thoughts, "reasoning": thoughts}
        if self.calls:
            found["tool_calls"] = [call.fields for call in self.calls]
        return found


@dataclass
class _Call:
    """One call of a choice."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    @property
    def fields(self) -> dict[str, Any]:
        """As a message has them."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ChatWhole:
    """A chat's answer in one piece.

    Args:
        form: what the answer has.
        request: the prompt in flight.
    """

    def __init__(self, form: ChatForm, request: Request) -> None:
        self._form = form
        self._request = request
        self._choices = [_Choice(form.new_speech()) for _ in range(form.num_choices)]

    def push(self, number: int, delta: CompletionOutput) -> None:  # one prompt
        """Add a delta."""
        choice = self._choices[delta.index]
        said = self._form.said(choice.speech, delta)
        for each in said.events:
            choice.add(each)
        if self._form.head.has_token_ids:
            choice.token_ids += delta.token_ids
        choice.logprobs += self._form.logprobs(delta) or []
        choice.finish_reason, choice.stop_reason = said.finish_reason, delta.stop_reason

    async def body(self, usage: Usage) -> bytes:
        """The response as JSON."""
        head = self._form.head
        whole = {
            **head.fields(WHOLE),
            "choices": [self._fields(i, choice) for i, choice in enumerate(self._choices)],
            "usage": usage.fields,
        }
        if self._request.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self._request.prompt_logprobs)
        if head.has_token_ids:
            whole["prompt_token_ids"] = self._request.prompt.token_ids
        return orjson.dumps(whole)

    def _fields(self, index: int, choice: _Choice) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": index,
            "message": choice.message(has_thoughts=self._form.has_thoughts),
            "logprobs": None if self._form.num_top is None else {"content": choice.logprobs},
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._form.head.has_token_ids:
            found["token_ids"] = choice.token_ids
        return found
