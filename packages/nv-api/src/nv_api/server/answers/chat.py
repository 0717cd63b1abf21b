"""Chat answers: the messages of /v1/chat/completions, streamed or whole.

Owns their shape. What a text says is the reader's matter.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from nv_api.outputs import CompletionOutput
from nv_api.request import Request
from nv_api.server.answers.form import EndsWithDone, Head
from nv_api.server.generation import Usage
from nv_api.server.probabilities import TokenNames, chat_logprobs, prompt_logprobs
from nv_api.server.reader import Reader
from nv_api.server.sse import event

CHUNK, WHOLE = "chat.completion.chunk", "chat.completion"


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """What a chat's answer has, whether it is streamed or not.

    Attributes:
        head: the fields that begin every object.
        names: of tokens.
        num_top: most likely tokens beside each; None: no log-probabilities.
        new_reader: makes a reader for one completion.
        num_choices: n.
    """

    head: Head
    names: TokenNames
    num_top: int | None
    new_reader: Callable[[], Reader]
    num_choices: int

    def logprobs(self, delta: CompletionOutput) -> list[dict[str, Any]] | None:
        """Of the tokens of a delta; None unless asked for."""
        if self.num_top is None:
            return None
        return chat_logprobs(delta.logprobs or [], self.num_top, self.names)


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
        self._readers = [form.new_reader() for _ in range(form.num_choices)]
        self._has_begun = [False] * form.num_choices
        self._has_prompt_ids = not form.head.has_token_ids
        is_plain = form.num_top is None and not (
            form.head.has_token_ids or form.head.has_running_usage
        )
        self._prefixes = [self._prefix(i) for i in range(form.num_choices)] if is_plain else None
        usage_field = b',"usage":null' if form.head.has_usage else b""
        self._suffix = b'},"logprobs":null,"finish_reason":null}]' + usage_field + b"}\n\n"

    def push(self, number: int, delta: CompletionOutput) -> bytes:  # one prompt
        """The events of a delta: its role if it is the first, its text, its end."""
        index = delta.index
        content = self._readers[index].push(delta.text).content if delta.text else ""
        if delta.finish_reason is None:
            events = self._news(delta, content)
        else:
            content += self._readers[index].end().content
            events = self._news(delta, content) + self._end(delta)
        if events and not self._has_begun[index]:
            self._has_begun[index] = True
            return self._role(index) + events
        return events

    def end(self, usage: Usage) -> bytes:
        """The chunk with the usage, if it was asked for."""
        if not self._form.head.has_usage:
            return b""
        return event({**self._head, "choices": [], "usage": usage.fields})

    def _news(self, delta: CompletionOutput, content: str) -> bytes:
        """The event of what is new; b"" if there is nothing to show yet."""
        if self._prefixes is not None:
            if not content:
                return b""
            return self._prefixes[delta.index] + orjson.dumps(content) + self._suffix
        logprobs = self._form.logprobs(delta)
        has_ids = self._form.head.has_token_ids and delta.token_ids
        if not content and not logprobs and not has_ids:
            return b""
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": content},
            "logprobs": None if logprobs is None else {"content": logprobs},
            "finish_reason": None,
        }
        if self._form.head.has_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._event(choice)

    def _role(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        more: dict[str, Any] = {}
        if not self._has_prompt_ids:
            self._has_prompt_ids = True
            more["prompt_token_ids"] = self._request.prompt.token_ids
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(choice, **more)

    def _end(self, delta: CompletionOutput) -> bytes:
        return self._event(
            {
                "index": delta.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": delta.finish_reason,
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
        """An event up to its text, made once."""
        head = orjson.dumps(self._head)[:-1]
        return b"data: %s,%s" % (head, b'"choices":[{"index":%d,"delta":{"content":' % index)


@dataclass
class _Choice:
    """One completion, as far as it has come."""

    reader: Reader
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatWhole:
    """A chat's answer in one piece.

    Args:
        form: what the answer has.
        request: the prompt in flight.
    """

    def __init__(self, form: ChatForm, request: Request) -> None:
        self._form = form
        self._request = request
        self._choices = [_Choice(form.new_reader()) for _ in range(form.num_choices)]

    def push(self, number: int, delta: CompletionOutput) -> None:  # one prompt
        """Add a delta."""
        choice = self._choices[delta.index]
        choice.texts.append(choice.reader.push(delta.text).content)
        if self._form.head.has_token_ids:
            choice.token_ids += delta.token_ids
        choice.logprobs += self._form.logprobs(delta) or []
        if delta.finish_reason is not None:
            choice.texts.append(choice.reader.end().content)
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def body(self, usage: Usage) -> bytes:
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
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": None if self._form.num_top is None else {"content": choice.logprobs},
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._form.head.has_token_ids:
            found["token_ids"] = choice.token_ids
        return found
