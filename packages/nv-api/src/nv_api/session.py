"""Session: one engine, driven by one thread at a time.

Owns when the engine steps and the results that wait to be asked for; never reads what a user wrote
(prompts come tokenized) and never makes a text (the processor does).
"""

import threading
import warnings
from collections.abc import Container, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nv_api.collector import CollectorPause
from nv_api.interrupts import whole_step
from nv_api.outputs import RequestOutput
from nv_api.processor import END, Finished, Processor, Request
from nv_api.progress import Progress, UseTqdm
from nv_api.prompts import TokenPrompt
from nv_api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nv_engine import Engine, SamplingParams, StepOutput


ALL = slice(None)
"""Of a list: every entry."""


class Session:
    """Runs requests to their end, streams one, or goes step by step; all three at once if need be.

    Args:
        engine: the engine; closed with the session.
        tokenizer: None if there is no text, only token ids.
    """

    def __init__(self, engine: "Engine", tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._processor = Processor(engine, tokenizer)
        self._kept: list[Finished] = []  # ended, and not yet returned by `step`
        self._num_warned = 0  # of those: `step` has warned of errors among them
        self._told_of_full_pool = False
        self._is_closed = False
        self._turn = threading.RLock()  # whoever takes a stream's texts may call between them

    @property
    def finished(self) -> bool:
        """True if no request is left, no step is out and every result was told."""
        return not self._kept and not self._is_busy

    @property
    def _is_busy(self) -> bool:
        """True while a step is worth taking: for a request, or for one aborted in mid-step."""
        processor = self._processor
        return bool(processor.has_unfinished or processor.ended or self._engine.has_unfinished)

    def check_usable(self) -> None:
        """Raise a RuntimeError in a fork of the process that made this LLM, or without a device."""
        self._engine.check_usable()

    def add(self, prompt: TokenPrompt, params: "SamplingParams") -> Request:
        """Queue a prompt; raises as `Processor.add_list` does."""
        with self._alone():
            return self._processor.add(prompt, params)

    def run(
        self, prompts: Sequence[TokenPrompt], params: Sequence["SamplingParams"], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        """Complete prompts, in their order; on any exception none of them is left behind."""
        if self._is_closed:
            raise ValueError("this LLM is closed: make a new one")
        if not prompts:
            return []
        requests: list[Request] = []
        with self._alone():
            pause = CollectorPause()
            try:
                pause.begin()
                requests += self._processor.add_list(prompts, params)
                self._finish(requests, use_tqdm, pause)
            finally:
                pause.end()
                self._drop(requests)
        ended = [Finished(each, one) for each in requests for one in each.completions]
        warn_of_errors(ended, stacklevel=5)
        return [request.output() for request in requests]

    def stream(self, prompt: TokenPrompt, params: "SamplingParams") -> Generator[str]:
        """The text of a prompt's first completion as it comes; closing the iterator aborts it.

        Raises:
            RuntimeError: the request failed on the device.
        """
        request = self.add(prompt, params)
        own = {request.request_id}
        try:
            while not request.finished:
                self._advance(own)
                if text := request.completions[0].delta().text:
                    yield text
            ended = request.output().outputs[0]
            if ended.finish_reason == "error":
                raise RuntimeError(f"the request failed on the device: {ended.stop_reason}")
        finally:
            self._drop([request])

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """One step: what ended and was not returned yet, and num_tokens, as `LLM.step` has them.

        After an exception the next call returns what this one could not.
        """
        num_tokens = 0
        if self._is_busy:
            step, _ = self._advance(own=frozenset())
            num_tokens = step.num_prefill_tokens or -step.num_decode_tokens
        elif not self._kept:
            self.check_usable()
        unwarned, self._num_warned = self._kept[self._num_warned :], len(self._kept)
        warn_of_errors(unwarned, stacklevel=4)
        pairs = [(e.request.request_id, list(e.completion.token_ids)) for e in self._kept]
        # One line without a call: an interrupt finds the results kept, or returned.
        self._kept, self._num_warned = [], 0; return pairs, num_tokens  # fmt: skip  # noqa: E702

    def abort(self, request_id: int) -> None:
        """Drop a request and its results; an unknown one is a no-op."""
        with self._alone():
            self._processor.abort(request_id)
        self._forget({request_id})

    def close(self) -> None:
        """Stop the engine; a second call is a no-op."""
        self._is_closed = True
        self._engine.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse this thread while another is at work: the engine's state is nobody else's then."""
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                "another thread is using this LLM: let one thread at a time call it, with a lock "
                "around the calls, or with all prompts in one call of generate"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _forget(self, request_ids: Container[int]) -> None:
        """Let `step` return nothing of these requests."""
        halves = self._kept[: self._num_warned], self._kept[self._num_warned :]
        warned, others = (
            [e for e in half if e.request.request_id not in request_ids] for half in halves
        )
        self._kept, self._num_warned = warned + others, len(warned)

    def _drop(self, requests: Sequence[Request]) -> None:
        """Abort what has not ended; if nobody else is left, see its last step back home."""
        for request in requests:
            self._processor.abort(request.request_id)
        self._forget({request.request_id for request in requests})
        if not self._engine.is_here:
            return  # a stream that a fork inherited: its steps are not this process's
        while self._engine.has_unfinished and not self._processor.has_unfinished:
            self._engine.step()

    def _finish(
        self, requests: Sequence[Request], use_tqdm: UseTqdm, pause: CollectorPause
    ) -> None:
        """Step until these requests have ended; the pause ends with the first step."""
        own = {request.request_id for request in requests}
        with Progress(len(requests), use_tqdm) as progress:
            num_left = len(requests)
            while num_left and self._is_busy:  # a call from within a bar may have ended them
                step, num_ended = self._advance(own)
                pause.end()
                num_left -= num_ended
                progress.step(step.num_prefill_tokens, step.num_decode_tokens, num_ended)

    def _advance(self, own: set[int] | frozenset[int]) -> tuple["StepOutput", int]:
        """Step the engine once, and keep what ended for `step`, but for the caller's `own`.

        Returns:
            The engine's step, and how many of the caller's requests ended in it.

        Raises:
            RuntimeError: the session is closed, or another thread is at work.
        """
        if self._is_closed:
            raise RuntimeError(
                "this LLM is closed, its unfinished requests are lost: make a new one"
            )
        with self._alone(), whole_step():
            step = self._engine.advance()
            untaken = self._processor.process(step.updates)
            ended = tuple(untaken)
            kept = [each for each in ended if each.request.request_id not in own]
            # One statement without a call: an interrupt finds all of it done, or nothing.
            self._kept[END], untaken[ALL] = kept, ()
        self._tell_of_full_pool(ended)
        done = {e.request.request_id for e in ended if e.request.finished}
        return step, len(done & own)

    def _tell_of_full_pool(self, ended: Sequence[Finished]) -> None:
        """Warn, once, of a completion that was cut for want of memory and not by its parameters."""
        for request, completion in () if self._told_of_full_pool else ended:
            if completion.finish_reason == "length" and completion.stop_reason is not None:
                self._told_of_full_pool = True
                warnings.warn(
                    f"request {request.request_id} ended with finish_reason 'length' after "
                    f"{len(completion.token_ids)} tokens: {completion.stop_reason} (said once)",
                    stacklevel=4,
                )
                return


def warn_of_errors(ended: Sequence[Finished], *, stacklevel: int) -> None:
    """Say how many completions failed, whose the first was, and why.

    Args:
        ended: some completions that ended.
        stacklevel: of the user's own line, as `warnings.warn` counts.
    """
    failed = [each for each in ended if each.completion.finish_reason == "error"]
    if failed:
        request, completion = failed[0]
        warnings.warn(
            f"{len(failed)} completion{'s' if len(failed) > 1 else ''} ended with finish_reason "
            f"'error', request {request.request_id} first: {completion.stop_reason}",
            stacklevel=stacklevel,
        )
