"""Generation: the prompts of one HTTP request in the engine.

Owns their streams, from the engine's acceptance to the end. Never makes a response.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nv_engine import ModelFacts, PoolingParams, SamplingParams
from nv_engine.validation import numbered, plain_prompt

from nv_api.outputs import CompletionOutput
from nv_api.prompts import TokenPrompt
from nv_api.request import Request
from nv_api.server.errors import failed, losses, refusals
from nv_api.server.llm import ServedLLM, ServedStream
from nv_api.server.metrics import Metrics, Timing
from nv_api.server.thought_tokens import ThoughtTokens
from nv_api.server.turns import turn

Take = Callable[[int, Sequence[CompletionOutput]], Awaitable[object] | None]
"""Gets a prompt's number and what is new of its completions. Returns something to await if it can
take nothing more before that."""

FAILURES = frozenset({"error", "abort"})
"""Reasons for which a completion finished without being whole."""


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; a prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    """Of the completions' tokens, those of their thoughts."""

    @property
    def fields(self) -> dict[str, object]:
        """As a response has them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Accepted(NamedTuple):
    """A prompt that the engine runs."""

    stream: ServedStream
    params: SamplingParams | PoolingParams
    thoughts: Sequence[ThoughtTokens]
    """Counters of its completions; [] where they cannot think."""


class Generation:
    """Prompts that the engine has accepted; `with generation:` aborts what is left at its end.

    Args:
        llm: the model.
        prompts: of one HTTP request.
        metrics: where times and tokens are counted.
        arrived_at: when the HTTP request came, by the event loop's clock.
    """

    def __init__(
        self, llm: ServedLLM, prompts: Sequence[Accepted], metrics: Metrics, arrived_at: float
    ) -> None:
        self._llm = llm
        self._prompts = prompts
        self._metrics = metrics
        self._timings = [
            Timing(metrics, arrived_at, len(each.prompt.token_ids), len(each.completions))
            for each in self.requests
        ]

    def __enter__(self) -> "Generation":
        if self._prompts[0].stream.request.prompt.lora is not None:
            self._metrics.with_adapters[id(self)] = self.requests
        return self

    def __exit__(self, *error: object) -> None:
        self._metrics.with_adapters.pop(id(self), None)
        for stream, _, _ in self._prompts:
            running = [each for each in stream.request.completions if not each.finished]
            self._metrics.endings["abort"] += len(running)
            stream.abort()

    @property
    def requests(self) -> list[Request]:
        """One for each prompt."""
        return [stream.request for stream, _, _ in self._prompts]

    def usage(self) -> Usage:
        """The tokens so far."""
        requests = self.requests
        return Usage(
            sum(len(request.prompt.token_ids) for request in requests),
            sum(timing.num_tokens for timing in self._timings),
            sum(request.num_cached_tokens for request in requests),
            sum(thought.num_tokens for each in self._prompts for thought in each.thoughts),
        )

    async def run(self, take: Take) -> None:
        """Hand on everything that comes, until every completion has ended.

        Raises:
            ApiError: the engine has failed on a completion, or is lost.
        """
        if len(self._prompts) == 1:
            await self._pump(0, take)
            return
        tasks: list[asyncio.Task[None]] = []
        try:
            for number in range(len(self._prompts)):
                await turn(number)
                tasks.append(asyncio.create_task(self._pump(number, take)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _pump(self, number: int, take: Take) -> None:
        timing, (stream, params, thoughts) = self._timings[number], self._prompts[number]
        clock = asyncio.get_running_loop().time

        def each(deltas: Sequence[CompletionOutput]) -> Awaitable[object] | None:
            timing.note(deltas, clock())
            for delta in deltas:
                if delta.finish_reason is not None and delta.finish_reason in FAILURES:
                    raise failed(f"the engine failed on this request: {delta.stop_reason}")
                if thoughts:
                    thoughts[delta.index].push(delta.token_ids)
            return take(number, deltas)

        with losses(self._llm):
            await stream.hand_on(each)
        max_tokens = params.max_tokens if isinstance(params, SamplingParams) else None
        timing.end(max_tokens, stream.request.metrics)


async def submit(
    llm: ServedLLM,
    prompts: Sequence[TokenPrompt],
    params: Sequence[SamplingParams | PoolingParams],
) -> list[ServedStream]:
    """Send prompts to the engine, and return once it has accepted all of them.

    Raises:
        ApiError: 400, it refuses one; then it runs none of them. 503, it is lost.
    """
    await _check_all(prompts, llm.facts)
    tasks: list[asyncio.Future[ServedStream]] = []
    try:
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            await turn(number)
            tasks.append(asyncio.ensure_future(llm.submit(prompt, own)))
        await asyncio.wait(tasks)
        with losses(llm), refusals("prompt"):
            return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_abort)
        raise


async def _check_all(prompts: Sequence[TokenPrompt], facts: ModelFacts) -> None:
    """Refuse several prompts before the engine gets the first, which it would run meanwhile."""
    checked: list[list[int]] = []
    if len(prompts) > 1:
        with refusals("prompt"), numbered(checked, len(prompts)):
            for number, prompt in enumerate(prompts):
                await turn(number)
                checked.append(plain_prompt(prompt.token_ids, facts, plain=True))


def _abort(task: "asyncio.Future[ServedStream]") -> None:
    """End a stream that nothing will read."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()
