"""Processor: turns prompts into engine requests, and the engine's updates into text.

Owns the requests in flight. Never steps the engine: its caller passes each step's updates in, and
reads deltas (a stream), snapshots (a server) or final outputs (a list) from the requests.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from nv_engine import EngineRequest
from nv_engine.validation import numbered
from nv_engine.values import shown

from nv_api.completion import Completion
from nv_api.logprobs import TokenText
from nv_api.pooled_request import PooledRequest
from nv_api.prompts import TokenPrompt
from nv_api.request import Finished, Request
from nv_api.row_tokens import RowTokens
from nv_api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nv_engine import (
        Grammar,
        PoolingParams,
        SamplingParams,
        SequenceUpdate,
        StructuredOutputsParams,
    )


AnyRequest = TypeVar("AnyRequest", bound=Request)
FIRST, END = slice(1), slice(sys.maxsize, None)
"""Slices of a list: its first entry; the place where an assignment appends."""


CompileGrammar: TypeAlias = Callable[["StructuredOutputsParams"], "Grammar | None"]
"""None: the engine's own process compiles it, of the request's parameters."""


class Receiver(Protocol):
    """Takes requests: an engine, or the way to one in another process."""

    def add_list(self, requests: Iterable[EngineRequest], *, plain: bool) -> list[int]:
        """Queue requests; returns their ids."""

    def abort(self, request_id: int, index: int | None = None) -> object:
        """End a request, or one of its completions."""


class Processor:
    """The requests in flight on one engine, from prompt to text.

    Args:
        engine: receives requests and aborts; its owner, the caller, steps it.
        tokenizer: None if there is no text, only token ids.
        compile_grammar: makes a grammar of what a request asks for.
    """

    def __init__(
        self, engine: Receiver, tokenizer: Tokenizer | None, compile_grammar: CompileGrammar
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._compile_grammar = compile_grammar
        self._requests: dict[int, Request] = {}
        self.ended: list[Finished] = []
        """Completions that have ended, oldest first; the caller empties the list."""

    @property
    def has_unfinished(self) -> bool:
        """True while a request is in flight."""
        return bool(self._requests)

    def add(
        self, prompts: Sequence[TokenPrompt], params: Sequence["SamplingParams"]
    ) -> list[Request]:
        """Queue prompts that come together, all or none.

        Raises:
            ValueError: the engine refuses a prompt or its parameters, a grammar does not compile,
                or a parameter needs a tokenizer and there is none; of several prompts, the error
                names the first wrong one by its place in the list.
            ImportError: a prompt has a grammar, and llguidance is not installed.
        """
        distinct = {id(each): each for each in params}  # often one object for all prompts
        copies = {key: each.frozen() for key, each in distinct.items()}
        frozen = [copies[id(each)] for each in params]
        requested: list[EngineRequest] = []
        made: dict[int, tuple[SamplingParams, Grammar | None]] = {}
        with numbered(requested, len(prompts)):
            for prompt, own in zip(prompts, frozen, strict=True):
                if id(own) not in made:
                    made[id(own)] = self._lower(own), self._grammar(own)
                lowered, grammar = made[id(own)]
                requested.append(
                    EngineRequest(
                        prompt.token_ids,
                        lowered,
                        grammar,
                        cache_salt=prompt.cache_salt,
                        lora=prompt.lora,
                    )
                )
        return self._queue(requested, partial(map, self._request), prompts, frozen)

    def pool(
        self, prompts: Sequence[TokenPrompt], params: Sequence["PoolingParams"]
    ) -> list[PooledRequest]:
        """Queue prompts that are to be pooled, all or none; raises as `add`."""
        requested = [
            EngineRequest(prompt.token_ids, own, cache_salt=prompt.cache_salt, lora=prompt.lora)
            for prompt, own in zip(prompts, params, strict=True)
        ]
        return self._queue(requested, partial(map, PooledRequest), prompts, params)

    def _queue(
        self,
        requested: Sequence[EngineRequest],
        make: Callable[..., Iterable[AnyRequest]],
        *columns: Iterable[object],
    ) -> list[AnyRequest]:
        """Hand requests to the engine, and keep what `make` makes of their ids and columns."""
        ids = self._engine.add_list(requested, plain=True)
        try:
            requests = list(make(ids, *columns))
            self._requests.update((request.request_id, request) for request in requests)
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
                self._engine.abort(request_id)
            raise
        return requests

    def _request(self, request_id: int, prompt: TokenPrompt, params: "SamplingParams") -> Request:
        completions = tuple(self._completion(i, prompt, params) for i in range(params.n))
        return Request(request_id, prompt, completions, self._token_text(params))

    def rows(self, names: Iterable[tuple[int, int]]) -> RowTokens:
        """The rows of a step.

        Args:
            names: of each, its request's id and its completion's index.
        """
        get = self._requests.get
        return RowTokens((get(request_id), index) for request_id, index in names)

    def completion(self, update: "SequenceUpdate") -> Completion | None:
        """The completion of an update; None if its request is not in flight any more."""
        request = self._requests.get(update.request_id)
        return None if request is None else request.completions[update.index]

    def process(self, updates: list["SequenceUpdate"]) -> list[Finished]:
        """Apply a step's updates, and abort in the engine each completion that a stop string ended.

        After an exception nothing is lost and nothing counts twice: the next call continues with
        the updates that are left in the list and the completions in `ended`.

        Args:
            updates: each is removed from the list once it is applied in full.

        Returns:
            `ended`: the completions that have ended, in the order of the updates.
        """
        while updates:
            self._take(updates)
        for request, _ in self.ended:
            if request.finished:
                self._requests.pop(request.request_id, None)
        return self.ended

    def _take(self, updates: list["SequenceUpdate"]) -> None:
        """Apply the first update and remove it."""
        update = updates[0]
        request = self._requests.get(update.request_id)
        completion = None if request is None else request.completions[update.index]
        if request is not None and completion is not None and request.only_adds(update, completion):
            # nearly always; one statement without a call: an interrupt finds both done or none
            completion.token_ids[END], updates[FIRST] = update.token_ids, ()
            return
        if request is None or completion is None or completion.finished:
            del updates[0]
        else:
            new = [Finished(request, completion)] if request.update(update) else []
            # one statement without a call: an interrupt comes before or after all three
            updates[FIRST], completion.begun, self.ended[END] = (), None, new
        ends_here = completion is None or completion.finished
        if ends_here and update.finish_reason is None:  # the engine would continue it
            self._engine.abort(update.request_id, update.index)

    def abort(self, request_id: int) -> None:
        """Stop a request; its unfinished completions end with "abort".

        Its completions in `ended` are removed. An unknown or finished request is a no-op.
        """
        self.ended[:] = [each for each in self.ended if each.request.request_id != request_id]
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._engine.abort(request_id)
        request.abort()

    def _lower(self, params: "SamplingParams") -> "SamplingParams":
        """Replace bad words by their token ids: the engine does not read text.

        Raises:
            ValueError: there are stop strings or bad words, and no tokenizer.
        """
        if params.stop_strings and self._tokenizer is None:
            raise ValueError(
                f"stop is {shown(params.stop)} and there is no tokenizer "
                "(skip_tokenizer_init=True): use stop_token_ids"
            )
        if not params.bad_words:
            return params
        if self._tokenizer is None:
            raise ValueError(
                f"bad_words is {shown(params.bad_words)} and there is no tokenizer "
                "(skip_tokenizer_init=True): use bad_words_token_ids"
            )
        words = [ids for word in params.bad_words for ids in self._tokenizer.word_ids(word)]
        more = params.bad_words_token_ids or ()
        return replace(params, bad_words_token_ids=[*more, *words]).frozen()

    def _grammar(self, params: "SamplingParams") -> "Grammar | None":
        """Compile `structured_outputs`; None if the text is free."""
        wanted = params.structured_outputs
        return None if wanted is None else self._compile_grammar(wanted)

    def _completion(self, index: int, prompt: TokenPrompt, params: "SamplingParams") -> Completion:
        token_text = self._token_text(params)
        if self._tokenizer is None or token_text is None:
            return Completion(index, params, None)
        detokenizer = self._tokenizer.detokenizer(params, prompt.token_ids)
        return Completion(index, params, detokenizer, token_text, prompt.place)

    def _token_text(self, params: "SamplingParams") -> TokenText | None:
        """Returns a token's text; None where no text is wanted."""
        return self._tokenizer.token_text if self._tokenizer and params.detokenize else None
