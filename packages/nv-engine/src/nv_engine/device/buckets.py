"""Buckets: the few sizes that steps are padded to, so that few graphs serve them all.

Owns the sizes. Never pads.
"""

import bisect
from collections.abc import Sequence
from itertools import chain

from nv_engine.device.inputs import Layout
from nv_engine.mixed import MixedSteps

LEAST_CONTEXT = 2048
"""Bounds on the context start here and double: an attention grid for more would be idle."""
CHUNK_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Larger steps keep the device busy for about as long as the host needs to launch them."""
COARSE_ROWS = (1, 8, 32, 128, 256)
COARSE_CHUNK_ROWS = (16,)
COARSE_CHUNK_TOKENS = (512, 2048, 8192)
"""The sizes of graphs that many steps share, until they have their own: a step in one is padded to
at most some four times its size. It takes less than to launch it eagerly, or to wait for a capture:
25 to 70 ms for 28 layers on an H200's host, of which 2 are not launches."""
LARGE_STEP_COUNT = 8
"""Eager steps of such a layout before its graph: a capture takes as long as a few of them."""


class Buckets:
    """Sizes up to an engine's limits."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, mixed: MixedSteps | None = None
    ) -> None:
        self._batches = batches(max_num_seqs)
        self._decodes = [0, *(2**i for i in range(3, 20) if 2**i < max_num_seqs), max_num_seqs]
        self._mixed = mixed
        self._chunk_rows = [*(4**i for i in range(1, 9) if 4**i < max_num_seqs), max_num_seqs]
        if mixed is not None:  # steps of such models are long: few layouts, little padding
            self._decodes = mixed.decode_sizes(max_num_seqs)
            self._chunk_rows = [rows for rows in self._chunk_rows if rows != 4] or [4]
        self._max_model_len = max_model_len

    def context(self, max_context_len: int) -> int:
        """A bound on the contexts."""
        rounded = 1 << (max_context_len - 1).bit_length()
        return min(max(LEAST_CONTEXT, rounded), self._max_model_len)

    def layout(self, exact: Layout) -> Layout:
        """Room for a step; for a large one with prompts no more than it needs.

        Padding would cost a large step more than a graph saves, and lists of one shape bring the
        same steps again.
        """
        if exact.only_single_tokens:
            rows = _at_least(self._batches, exact.num_rows)
            return Layout(rows, rows, rows, 1, self.context(exact.max_context_len))
        num_tokens = exact.chunk_tokens
        if num_tokens > CHUNK_TOKENS[-1]:
            return exact
        decodes = _at_least(self._decodes, exact.num_decodes)
        rows = _at_least(self._chunk_rows, exact.chunk_rows)
        tokens = _at_least(CHUNK_TOKENS, num_tokens)
        if num_tokens <= (room := self._room(decodes)):
            tokens = min(tokens, room)
        context = self.context(exact.max_context_len)
        return Layout(decodes, decodes + rows, decodes + tokens, tokens, context)

    def coarse(self, layout: Layout) -> Layout:
        """The larger layout that is captured where no captured one has room for this one."""
        context, most = layout.max_context_len, self._batches[-1]
        rows = _coarse(COARSE_ROWS, layout.num_decodes, most)
        if layout.only_single_tokens:
            return Layout(rows, rows, rows, 1, context)
        if self._mixed is not None or layout.chunk_tokens > CHUNK_TOKENS[-1]:
            return layout
        decodes = rows if layout.num_decodes else 0
        chunk_rows = _coarse(COARSE_CHUNK_ROWS, layout.chunk_rows, most)
        tokens = _at_least(COARSE_CHUNK_TOKENS, layout.chunk_tokens)
        return Layout(decodes, decodes + chunk_rows, decodes + tokens, tokens, context)

    def least_count(self, layout: Layout) -> int:
        """How often a layout must have come before it is captured."""
        if layout.only_single_tokens:
            return 0
        num_tokens = layout.chunk_tokens
        if num_tokens > CHUNK_TOKENS[-1]:
            return LARGE_STEP_COUNT
        return 0 if num_tokens == self._room(layout.num_decodes) else 1  # a full one comes again

    def _room(self, num_decodes: int) -> int:
        """Tokens of prompts in a full step beside so many decoding rows; 0: no step is full."""
        return self._mixed.room(num_decodes) if self._mixed and num_decodes else 0


def batches(max_num_seqs: int) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, then in steps of 8, 16 above 64, 32 above 256.

    The largest is max_num_seqs itself, so that every size has a bucket.
    """
    sizes = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, max_num_seqs, 32))
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def _coarse(sizes: Sequence[int], size: int, most: int) -> int:
    """The first of `sizes` that has room, but no more than `most`."""
    return min(next((each for each in sizes if each >= size), most), most)


def _at_least(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect.bisect_left(sizes, size)]
