"""Processor: turns the engine's updates, which are token ids, into texts.

Owns the requests that run and what has become of each; never decides when the engine steps. It
works a step at a time: whoever drives the engine hands it each step's updates and reads deltas
(a stream), snapshots (a server) or final outputs (a list) from the requests.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from nv_engine import EngineRequest
from nv_engine.validation import numbered

from nv_api.completion import Completion
from nv_api.logprobs import TokenText, candidates
from nv_api.outputs import Logprob, RequestMetrics, RequestOutput
from nv_api.prompts import TokenPrompt
from nv_api.structured import CompiledGrammar, Grammars
from nv_api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nv_engine import Engine, SamplingParams, SequenceUpdate


FIRST, END = slice(1), slice(sys.maxsize, None)
"""Of a list: its first entry; where an assignment appends."""


class Request:
    """One prompt on its way, with its `params.n` completions."""

    def __init__(
        self,
        request_id: int,
        prompt: TokenPrompt,
        completions: tuple[Completion, ...],
        token_text: TokenText | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.completions = completions
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._token_text = token_text
        self._arrival_time = time.monotonic()
        self._first_token_time: float | None = None
        self._finished_time: float | None = None

    @property
    def finished(self) -> bool:
        """True once every completion has ended."""
        return all(completion.finished for completion in self.completions)

    def update(self, update: "SequenceUpdate") -> bool:
        """Give an update to its completion, where it does not count yet; True if that ends."""
        completion = self.completions[update.index]
        completion.begin()
        if self._first_token_time is None and update.token_ids:
            self.num_cached_tokens = update.num_cached_tokens
            self._first_token_time = time.monotonic()
        if update.prompt_logprobs is not None:  # nothing comes before the first token
            said = (candidates(entry, self._token_text) for entry in update.prompt_logprobs)
            self.prompt_logprobs = [None, *said]
        if not completion.extend(
            update.token_ids, update.finish_reason, update.stop_reason, update.logprobs
        ):
            return False
        if all(other.finished for other in self.completions if other is not completion):
            self._finished_time = time.monotonic()
        return True

    def abort(self) -> None:
        """End what has not ended with "abort"."""
        for completion in self.completions:
            if not completion.finished:
                completion.abort()

    def output(self) -> RequestOutput:
        """The request as users see it: a snapshot, final once it has finished."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=RequestMetrics(self._arrival_time, self._first_token_time, self._finished_time),
        )


class Finished(NamedTuple):
    """A completion that ended in the step just processed."""

    request: Request
    completion: Completion


class Processor:
    """The requests of one engine, from prompt to text.

    Args:
        engine: where requests are added and aborted; the caller steps it.
        tokenizer: None if there is no text, only token ids.
    """

    def __init__(self, engine: "Engine", tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._requests: dict[int, Request] = {}
        self.ended: list[Finished] = []
        """Completions that ended, oldest first, until the caller takes them off."""

    @property
    def has_unfinished(self) -> bool:
        """True while a request runs or waits."""
        return bool(self._requests)

    def add(self, prompt: TokenPrompt, params: "SamplingParams") -> Request:
        """Queue a prompt; raises as `add_list` does."""
        (request,) = self.add_list([prompt], [params])
        return request

    def add_list(
        self, prompts: Sequence[TokenPrompt], params: Sequence["SamplingParams"]
    ) -> list[Request]:
        """Queue prompts that come together, all or none.

        Raises:
            ValueError: the engine refuses one, a grammar is none, or it needs a tokenizer and
                there is none; of several prompts, the error says which it was.
            ImportError: one has a grammar, and llguidance is not installed.
        """
        distinct = {id(each): each for each in params}  # one may be of all prompts
        copies = {key: each.frozen() for key, each in distinct.items()}
        frozen = [copies[id(each)] for each in params]
        asked: list[EngineRequest] = []
        made: dict[int, tuple[SamplingParams, CompiledGrammar | None]] = {}
        with numbered(asked, len(prompts)):
            for prompt, own in zip(prompts, frozen, strict=True):
                if id(own) not in made:
                    made[id(own)] = self._lower(own), self._grammar(own)
                asked.append(EngineRequest(prompt.token_ids, *made[id(own)]))
        ids = self._engine.add_list(asked, plain=True)
        try:
            requests = list(map(self._request, ids, prompts, frozen))
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

    def process(self, updates: list["SequenceUpdate"]) -> list[Finished]:
        """Take a step's updates in, and tell the engine which completions their text has ended.

        After an exception nothing is lost and nothing counts twice: the next call goes on with what
        is left in the list and in `ended`.

        Args:
            updates: each is taken off the list when all of it has been dealt with.

        Returns:
            The completions that ended, in the order of the updates: `ended`.
        """
        while updates:
            self._take(updates)
        for request, _ in self.ended:
            if request.finished:
                self._requests.pop(request.request_id, None)
        return self.ended

    def _take(self, updates: list["SequenceUpdate"]) -> None:
        """Deal with the first update, and take it off."""
        update = updates[0]
        request = self._requests.get(update.request_id)
        completion = None if request is None else request.completions[update.index]
        if request is None or completion is None or completion.finished:
            del updates[0]
        else:
            new = [Finished(request, completion)] if request.update(update) else []
            # One statement without a call: an interrupt finds all of it done, or nothing.
            updates[FIRST], completion.begun, self.ended[END] = (), None, new
        ends_here = completion is None or completion.finished
        if ends_here and update.finish_reason is None:  # the engine goes on with it
            self._engine.abort(update.request_id, update.index)

    def abort(self, request_id: int) -> None:
        """Stop a request; its completions end with "abort". An unknown or ended one is a no-op.

        What of it had ended, and was not taken off, is forgotten.
        """
        self.ended[:] = [each for each in self.ended if each.request.request_id != request_id]
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._engine.abort(request_id)
        request.abort()

    def _lower(self, params: "SamplingParams") -> "SamplingParams":
        """Spell bad words in token ids: the engine reads no text.

        Raises:
            ValueError: stop strings or bad words, and no tokenizer.
        """
        if params.stop_strings and self._tokenizer is None:
            raise ValueError(
                f"stop is {params.stop!r} and there is no tokenizer (skip_tokenizer_init=True): "
                "use stop_token_ids"
            )
        if not params.bad_words:
            return params
        if self._tokenizer is None:
            raise ValueError(
                f"bad_words is {params.bad_words!r} and there is no tokenizer "
                "(skip_tokenizer_init=True): use bad_words_token_ids"
            )
        words = [ids for word in params.bad_words for ids in self._tokenizer.word_ids(word)]
        more = params.bad_words_token_ids or ()
        return replace(params, bad_words_token_ids=[*more, *words]).frozen()

    def _grammar(self, params: "SamplingParams") -> CompiledGrammar | None:
        """Compile what the text must be, if it must be something."""
        asked = params.structured_outputs
        return None if asked is None else self._grammars.compile(asked)

    @cached_property
    def _grammars(self) -> Grammars:
        """The grammars of the tokenizer.

        Raises:
            ValueError: there is none.
        """
        if self._tokenizer is None:
            raise ValueError(
                "structured_outputs needs a tokenizer and there is none (skip_tokenizer_init=True)"
            )
        facts = self._engine.facts
        return Grammars(self._tokenizer.backend, facts.vocab_size, facts.eos_token_ids)

    def _completion(self, index: int, prompt: TokenPrompt, params: "SamplingParams") -> Completion:
        token_text = self._token_text(params)
        if self._tokenizer is None or token_text is None:
            return Completion(index, params, None)
        detokenizer = self._tokenizer.detokenizer(params, prompt.token_ids)
        return Completion(index, params, detokenizer, token_text)

    def _token_text(self, params: "SamplingParams") -> TokenText | None:
        """Texts of single tokens; None where there is no text."""
        return self._tokenizer.token_text if self._tokenizer and params.detokenize else None
