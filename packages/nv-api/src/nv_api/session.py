"""Session: one engine, driven by one thread at a time.

Owns the engine, when it steps, and the results that `step` has not returned yet. Never reads what a
user wrote (prompts come tokenized) and never makes text (the processor does).
"""

import sys
import threading
import weakref
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from nv_engine.user_line import warn_user
from nv_engine.values import one_id

from nv_api.collector import CollectorPause
from nv_api.exit_gate import ExitGate
from nv_api.interrupts import whole_step
from nv_api.outputs import CompletionOutput, RequestOutput
from nv_api.pooled_request import PooledRequest
from nv_api.processor import END, AnyRequest, Processor
from nv_api.progress import Progress, UseTqdm
from nv_api.prompts import TokenPrompt
from nv_api.request import Finished, Request
from nv_api.structured import grammar_compiler
from nv_api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from types import FrameType

    from nv_engine import Engine, LoRARequest, PoolingParams, SamplingParams, StepOutput


ALL = slice(None)
"""Slice of a list: every entry."""

T = TypeVar("T")


class Busy(RuntimeError):
    """The engine is at work: for another thread, or below this call."""


class Session:
    """Runs a list of requests to its end, streams one, or steps; the three may be mixed.

    Args:
        engine: belongs to the session from now on, which closes it.
        tokenizer: None if there is no text, only token ids.
    """

    def __init__(self, engine: "Engine", tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        backend = None if tokenizer is None else tokenizer.backend
        compiler = grammar_compiler(lambda: backend, engine)
        self._processor = Processor(engine, tokenizer, compiler)
        self._kept: list[Finished] = []  # ended, not yet returned by `step`
        self._left: list[Request | PooledRequest] = []  # to be dropped by the next step
        self._num_warned = 0  # `step` has warned of errors among the first so many
        self._warned_of_full_pool = False
        self._is_closed = False
        self._turn = threading.RLock()  # reentrant: a progress bar may call back
        self._gate = ExitGate(self._turn)
        weakref.finalize(self, self._gate.close)  # at the latest at the interpreter's end

    @property
    def finished(self) -> bool:
        """True if no request and no step is in flight and `step` has returned every result."""
        return not self._kept and not self._is_busy

    @property
    def _is_busy(self) -> bool:
        """True while a step has work: for a request, or to end a step of an aborted one."""
        processor = self._processor
        return bool(processor.has_unfinished or processor.ended or self._engine.has_unfinished)

    def check_usable(self) -> None:
        """Check that the engine can run requests here.

        Raises:
            RuntimeError: this is a fork of the process that made this LLM, or its device is lost.
        """
        self._engine.check_usable()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        return self._engine.facts.max_model_len

    @property
    def metrics(self) -> dict[str, int]:
        """The engine's counters since it started, and its state now, by name."""
        return asdict(self._engine.metrics)

    @property
    def num_failed_steps(self) -> int:
        """Steps that the device failed to run, which ended their requests with "error"."""
        return self._engine.num_failed_steps

    def add_lora(self, request: "LoRARequest") -> None:
        """Begin to read an adapter; raises as `Engine.add_adapter`."""
        with self._alone():
            self._work(partial(self._engine.add_adapter, request))

    def remove_lora(self, adapter_id: int) -> bool:
        """Let an adapter's id mean nothing; False if it meant nothing."""
        with self._alone():
            return self._work(partial(self._engine.remove_adapter, adapter_id))

    @property
    def lora_ids(self) -> set[int]:
        """The ids that mean an adapter."""
        return self._engine.adapter_ids

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        with self._alone():
            self._work(self._engine.reset_prefix_cache)

    def add(
        self, prompts: Sequence[TokenPrompt], params: Sequence["SamplingParams"]
    ) -> list[Request]:
        """Queue prompts, all or none, for `step`; raises as `Processor.add` does."""
        with self._all_or_none():
            return self._work(partial(self._processor.add, prompts, params))

    def run(
        self, prompts: Sequence[TokenPrompt], params: Sequence["SamplingParams"], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        """Complete prompts, in their order; any exception aborts them all."""
        add = partial(self.add, prompts, params)
        requests = self._run(add, len(prompts), use_tqdm)
        return [request.output() for request in requests]

    def add_pooled(
        self, prompts: Sequence[TokenPrompt], params: Sequence["PoolingParams"]
    ) -> list[PooledRequest]:
        """Queue prompts that are to be pooled, all or none, for `step`."""
        with self._all_or_none():
            return self._work(partial(self._processor.pool, prompts, params))

    def pool(
        self, prompts: Sequence[TokenPrompt], params: Sequence["PoolingParams"], use_tqdm: UseTqdm
    ) -> list[PooledRequest]:
        """Pool prompts, in their order; any exception aborts them all."""
        add = partial(self.add_pooled, prompts, params)
        return self._run(add, len(prompts), use_tqdm, "Pooling")

    def _run(
        self,
        add: Callable[[], list[AnyRequest]],
        count: int,
        use_tqdm: UseTqdm,
        title: str = "Generating",
    ) -> list[AnyRequest]:
        """Queue `count` requests by a call of `add`, and step until they have ended."""
        if self._is_closed:
            raise ValueError("this LLM is closed: make a new one")
        if not count:
            return []
        requests: list[AnyRequest] = []
        with self._alone():
            pause = CollectorPause()
            try:
                pause.begin()
                with self._all_or_none():
                    requests += add()
                self._finish(requests, Progress(count, use_tqdm, title=title), pause)
            finally:
                pause.end()
                self._drop(requests)
                self._engine.rest()
        ended = [Finished(each, one) for each in requests for one in each.completions]
        warn_of_errors(ended)
        return requests

    def stream(self, prompt: TokenPrompt, params: "SamplingParams") -> Generator[CompletionOutput]:
        """The deltas of one request as they come; closing the iterator aborts the request.

        The last delta of each completion has its finish_reason.
        """
        requests: list[Request] = []
        try:
            with self._all_or_none():
                requests += self.add([prompt], [params])
            (request,) = requests
            own = {request.request_id}
            running = list(request.completions)
            while running:
                if not request.finished:  # a call between two deltas may have finished it
                    self._advance(own)
                    self._engine.rest()  # the caller may use the device now
                for completion in tuple(running):
                    delta = completion.delta()
                    if delta.finished():
                        running.remove(completion)
                    if delta.token_ids or delta.text or delta.finished():
                        yield delta
        finally:
            if requests:
                self._drop(requests)

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Step the engine once; returns the outputs and num_tokens of `LLM.step`.

        After an exception the next call returns what this one did not.
        """
        num_tokens = 0
        if self._is_busy:
            step, _ = self._advance(own=frozenset())
            self._engine.rest()
            num_tokens = step.num_prefill_tokens or -step.num_decode_tokens
        elif not self._kept:
            self.check_usable()
        unwarned, self._num_warned = self._kept[self._num_warned :], len(self._kept)
        warn_of_errors(unwarned)
        pairs = [(e.request.request_id, list(e.completion.token_ids)) for e in self._kept]
        # one line without a call: after an interrupt the results are kept, or returned
        self._kept, self._num_warned = [], 0; return pairs, num_tokens  # fmt: skip  # noqa: E702

    def abort(self, request_id: int) -> None:
        """Abort a request and forget its results; an unknown id is a no-op."""
        one_id("request_id", request_id)
        with self._alone():
            self._work(partial(self._processor.abort, request_id))
        self._forget({request_id})

    def close(self) -> None:
        """Stop the engine; a second call is a no-op."""
        self._is_closed = True
        self._engine.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise if the engine, which is not thread-safe, is at work.

        Raises:
            Busy: another thread is inside it, or this call came from a signal handler or a
                finalizer that ran in the middle of its work.
        """
        if not self._turn.acquire(blocking=False):
            raise Busy(
                "another thread is using this LLM: let one thread at a time call it, with a lock "
                "around the calls, or with all prompts in one call of generate"
            )
        try:
            if self._is_at_work():
                raise Busy(
                    "this LLM was called in the middle of one of its own steps, as from a signal "
                    "handler: let the handler only set a flag, and call this LLM once the call "
                    "that runs has returned"
                )
            yield
        finally:
            self._turn.release()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """As `_alone`, and if the block is broken off, abort what it has queued.

        Ctrl-C may come when requests are queued and their list is on its way to the caller.
        """
        with self._alone():
            first = self._engine.next_id
            try:
                yield
            except BaseException:
                for request_id in range(first, self._engine.next_id):
                    self._work(partial(self._processor.abort, request_id))
                    self._work(partial(self._engine.abort, request_id))
                raise

    def _work(self, call: Callable[[], T]) -> T:
        """Call into the engine. As long as it works, the stack shows a frame of this function."""
        return call()

    def _is_at_work(self) -> bool:
        """Whether the engine is at work below the caller, in the same thread.

        Read from the stack: a flag could be left standing by an interrupt.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code in WORK and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def _forget(self, request_ids: Container[int]) -> None:
        """Remove the results of these requests, so that `step` does not return them."""
        halves = self._kept[: self._num_warned], self._kept[self._num_warned :]
        warned, others = (
            [e for e in half if e.request.request_id not in request_ids] for half in halves
        )
        self._kept, self._num_warned = warned + others, len(warned)

    def _drop(self, requests: Sequence[AnyRequest]) -> None:
        """Abort unfinished requests; if no other is in flight, also end the engine's last steps.

        If the engine is at work, as when a stream is collected in the middle of a step or closed by
        another thread, the next step does it.
        """
        try:
            with self._alone():
                self._work(partial(self._end, requests))
        except Busy:
            self._left += requests

    def _end(self, requests: Sequence[AnyRequest]) -> None:
        """Abort requests, and end the engine's last steps if no other is in flight."""
        self._abort(requests)
        if not self._engine.is_here:
            return  # a fork inherited this stream; the steps belong to the parent
        while self._engine.has_unfinished and not self._processor.has_unfinished:
            self._gate.go_through()
            self._engine.step()

    def _abort(self, requests: Sequence[AnyRequest]) -> None:
        """Abort requests and forget their results."""
        for request in requests:
            self._processor.abort(request.request_id)
        self._forget({request.request_id for request in requests})

    def _finish(
        self, requests: Sequence[Request], progress: Progress, pause: CollectorPause
    ) -> None:
        """Step until these requests have ended; the first step narrows the pause."""
        own = {request.request_id for request in requests}
        with progress:
            num_left = len(requests)
            while num_left and self._is_busy:  # a bar that calls back may have ended them
                step, num_ended = self._advance(own)
                pause.narrow()
                num_left -= num_ended
                progress.step(step.num_prefill_tokens, step.num_decode_tokens, num_ended)

    def _advance(self, own: set[int] | frozenset[int]) -> tuple["StepOutput", int]:
        """Step the engine once; keep for `step` what ended, except requests in `own`.

        Returns:
            The engine's step, and how many of the caller's requests ended in it.

        Raises:
            RuntimeError: the session is closed, or another thread is inside the engine.
        """
        if self._is_closed:
            raise RuntimeError(
                "this LLM is closed, its unfinished requests are lost: make a new one"
            )
        self._gate.go_through()
        with self._alone(), whole_step():
            step, ended = self._settle(own)
        self._warn_of_full_pool(ended)
        done = {e.request.request_id for e in ended if e.request.finished}
        return step, len(done & own)

    def _settle(self, own: Container[int]) -> tuple["StepOutput", tuple[Finished, ...]]:
        """Step the engine, bring the tokens to their requests; returns what ended too."""
        while self._left:
            self._abort(self._left[:1])
            del self._left[0]
        step = self._engine.advance()
        untaken = self._processor.process(step.updates)
        ended = tuple(untaken)
        kept = [each for each in ended if each.request.request_id not in own]
        # one statement without a call: an interrupt comes before or after both
        self._kept[END], untaken[ALL] = kept, ()
        return step, ended

    def _warn_of_full_pool(self, ended: Sequence[Finished]) -> None:
        """Warn, once per session, that a completion ended early because the KV cache is full."""
        for request, completion in () if self._warned_of_full_pool else ended:
            if completion.finish_reason == "length" and completion.stop_reason is not None:
                self._warned_of_full_pool = True
                warn_user(
                    f"request {request.request_id} ended with finish_reason 'length' after "
                    f"{len(completion.token_ids)} tokens: {completion.stop_reason} (warned once)"
                )
                return


WORK = (Session._work.__code__, Session._settle.__code__)
"""Functions that are on the stack as long as the engine works. Not a set: the hash of a code object
reads all its instructions, and each call compares the whole stack with these."""


def warn_of_errors(ended: Sequence[Finished]) -> None:
    """Warn how many of these completions failed, with the first one's request and reason."""
    failed = [each for each in ended if each.completion.finish_reason == "error"]
    if failed:
        request, completion = failed[0]
        warn_user(
            f"{len(failed)} completion{'s' if len(failed) > 1 else ''} ended with finish_reason "
            f"'error', request {request.request_id} first: {completion.stop_reason}"
        )
