"""Trial steps: what a worker runs before there is a KV cache, to compile kernels and see memory.

Owns which steps those are. Never runs one.
"""

from collections.abc import Iterator

from nv_engine.batch import Admission, Batch, Chunk
from nv_engine.config import EngineConfig
from nv_engine.params import SamplingParams

SMALL_STEPS = (1, 2, 16, 32, 64, 128, 256)
"""Rows of the steps whose kernels are compiled at the start: one step for each form that products
of few tokens have (`nv_kernels.triton.forms`). What is left out stops a running batch for a second
when it shrinks to that size."""


class TrialSteps:
    """The steps that take the most memory, and small ones, in a pool of a single block."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        self._num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._length = min(config.max_num_batched_tokens // self._num_rows, max_model_len - 1)

    def prefill(self) -> Batch:
        """As many tokens as a step may have, over as many rows as may sample, with every filter."""
        params = SamplingParams(top_k=50, top_p=0.9, min_p=0.01)
        rows = range(self._num_rows)
        ids = (0,) * self._length
        return Batch(
            chunks=tuple(Chunk(slot, 0, self._length, ids, samples=True) for slot in rows),
            admissions=tuple(Admission(slot, params, slot, self._length, ids) for slot in rows),
        )

    def small(self) -> Iterator[Batch]:
        """Steps of a few rows of one token, as the kernels for few rows differ by their number."""
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature)
            admissions = tuple(Admission(s, params, s, 1, (0,)) for s in range(self._num_rows))
            for size in {min(size, self._num_rows) for size in SMALL_STEPS}:
                chunks = tuple(Chunk(slot, 0, 1, (0,), samples=True) for slot in range(size))
                yield Batch(chunks, admissions)

    def decode(self) -> Batch:
        """One more token for each of those rows."""
        rows = range(self._num_rows)
        return Batch(chunks=tuple(Chunk(slot, self._length, 1, (), samples=True) for slot in rows))
