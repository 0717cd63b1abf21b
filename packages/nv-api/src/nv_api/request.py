"""Request: one prompt in flight, with its completions.

Owns what the engine has returned for the prompt, and when. Never talks to the engine.
"""

import time
from typing import TYPE_CHECKING, NamedTuple

from nv_api.completion import Completion
from nv_api.logprobs import TokenText, candidates
from nv_api.outputs import Logprob, RequestMetrics, RequestOutput
from nv_api.prompts import TokenPrompt

if TYPE_CHECKING:
    from nv_engine import SequenceUpdate


class Request:
    """One prompt in flight, with its `params.n` completions.

    Args:
        request_id: the engine's id of the request.
        prompt: its text and its token ids.
        completions: one per index, in order.
        token_text: texts of tokens with log-probabilities; None where no text is wanted.
    """

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
        self._scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._finished_time: float | None = None
        self._num_ended = 0  # completions at the beginning that were found finished

    @property
    def finished(self) -> bool:
        """True once every completion has ended."""
        return self._have_ended()

    def only_adds(self, update: "SequenceUpdate", completion: Completion) -> bool:
        """Whether an update only adds tokens to its completion, which runs."""
        return (
            update.finish_reason is None
            and self._first_token_time is not None
            and completion.is_plain
            and completion.finish_reason is None
            and completion.begun is None
            and update.prompt_logprobs is None
        )

    def update(self, update: "SequenceUpdate") -> bool:
        """Apply an update to its completion, which does not count it yet; True if that ends."""
        completion = self.completions[update.index]
        completion.begin()
        if self._first_token_time is None:
            self._scheduled_time = self._scheduled_time or update.scheduled_time
            if update.token_ids:
                self.num_cached_tokens = update.num_cached_tokens
                self._first_token_time = time.monotonic()
        if update.prompt_logprobs is not None:  # the first token has no context, so no candidates
            entries = (candidates(entry, self._token_text) for entry in update.prompt_logprobs)
            self.prompt_logprobs = [None, *entries]
        if not completion.extend(
            update.token_ids, update.finish_reason, update.stop_reason, update.logprobs
        ):
            return False
        if self._have_ended(but=completion):
            self._finished_time = time.monotonic()
        return True

    def _have_ended(self, but: Completion | None = None) -> bool:
        """True once every completion has ended, `but` aside.

        A finished completion stays so. Those at the beginning are passed once: with all of them
        checked at each end, the time would grow with the square of `n`.
        """
        every = self.completions
        while self._num_ended < len(every) and every[self._num_ended].finished:
            self._num_ended += 1
        rest = range(self._num_ended, len(every))
        return all(every[index].finished or every[index] is but for index in rest)

    def abort(self) -> None:
        """End every unfinished completion with "abort"."""
        for completion in self.completions:
            if not completion.finished:
                completion.abort()

    @property
    def metrics(self) -> RequestMetrics:
        """When things happened to it, so far."""
        return RequestMetrics(
            arrival_time=self._arrival_time,
            first_scheduled_time=self._scheduled_time,
            first_token_time=self._first_token_time,
            finished_time=self._finished_time,
        )

    def output(self, name: str | int | None = None) -> RequestOutput:
        """The request as users see it: a snapshot, final once the request has finished.

        Args:
            name: the id that the user gave it; None: the engine's.
        """
        return RequestOutput(
            request_id=self.request_id if name is None else name,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            lora_request=self.prompt.lora,
        )


class Finished(NamedTuple):
    """A completion that has ended, with its request."""

    request: Request
    completion: Completion
