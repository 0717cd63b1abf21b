"""Trial steps: run at the start, before there is a KV cache, to compile kernels and measure memory.

Owns which steps those are. Never runs one.
"""

from collections.abc import Iterator, Sequence

from nv_engine.batch import NO_ADAPTER, Admission, Batch, Chunk
from nv_engine.config import EngineConfig
from nv_engine.params import SamplingParams
from nv_engine.pooling_params import PoolingParams

SMALL_STEPS = (1, 2, 16, 32, 64, 128, 256, 384)
"""Rows of the steps whose kernels are compiled at the start: one step for each form that products
of few tokens have (`nv_kernels.linear.tuned`). What is left out stops a running batch for a second
when it shrinks to that size."""
FEW_PROMPTS = (1, 17)
"""Prompts of the steps that are compiled besides: the plan of attention has kernels for up to 16
and up to 128 of them, and `prefill` has more."""


class TrialSteps:
    """The steps that take the most memory, and small ones, in a pool of a single block.

    Args:
        config: the options.
        max_model_len: most tokens of a sequence.
        pooling: what is made of prompts; None: tokens are drawn.
    """

    def __init__(
        self, config: EngineConfig, max_model_len: int, pooling: PoolingParams | None = None
    ) -> None:
        self._pooling = pooling
        self._adapters = (NO_ADAPTER, 0) if config.enable_lora else (NO_ADAPTER,)
        budget = config.max_num_batched_tokens
        self._num_rows = min(config.max_num_seqs, budget)
        each, more = divmod(budget, self._num_rows)
        fewer = self._num_rows - more  # first, as in any step: theirs may be rows of one token
        self._lengths = [
            min(each + (row >= fewer), max_model_len - 1) for row in range(self._num_rows)
        ]

    def prefill(self) -> Batch:
        """As many tokens as a step may have, over as many rows as may sample, with every filter."""
        return self._prompts(list(enumerate(self._lengths)))

    def _prompts(self, rows: Sequence[tuple[int, int]]) -> Batch:
        """Prompts of those slots and lengths, with every filter."""
        params, adapter = SamplingParams(top_k=50, top_p=0.9, min_p=0.01), self._adapters[-1]
        return Batch(
            chunks=tuple(Chunk(slot, 0, n, (0,) * n, samples=True) for slot, n in rows),
            admissions=tuple(self._admission(slot, params, (0,) * n, adapter) for slot, n in rows),
        )

    def _admission(
        self, slot: int, params: SamplingParams, ids: tuple[int, ...], adapter: int
    ) -> Admission:
        pooling = self._pooling
        return Admission(slot, params, slot, len(ids), ids, pooling=pooling, adapter=adapter)

    def small(self) -> Iterator[Batch]:
        """Steps of a few rows, as the kernels for few rows differ by their number.

        Rows with adapters have kernels of their own.
        """
        params, rows = SamplingParams(), range(self._num_rows)
        for adapter in self._adapters:
            admissions = tuple(self._admission(slot, params, (0,), adapter) for slot in rows)
            for size in {min(size, self._num_rows) for size in SMALL_STEPS}:
                chunks = tuple(Chunk(slot, 0, 1, (0,), samples=True) for slot in range(size))
                yield Batch(chunks, admissions)
        for size in {min(size, self._num_rows) for size in FEW_PROMPTS}:
            yield self._prompts([(slot, 2) for slot in range(size)])

    def decode(self) -> Batch:
        """One more token for each of those rows."""
        rows = enumerate(self._lengths)
        return Batch(chunks=tuple(Chunk(slot, n, 1, (), samples=True) for slot, n in rows))
