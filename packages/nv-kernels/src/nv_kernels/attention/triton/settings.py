"""Launch settings of the attention kernels, chosen from host bounds.

Owns the tables of tile sizes, warps and stages, which measurement on an H100 decided
(benchmarks/kernels_attention.py), and what the kernels accept. Never launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nv_kernels.launch.card import num_multiprocessors
from nv_kernels.launch.sizes import next_power_of_2

if TYPE_CHECKING:
    from nv_kernels.attention.metadata import AttentionShape

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16
PREFILL_ROWS = 128  # of a query tile: tokens times the group's heads
SPLIT_PIECES = 4096  # pieces beyond one a (row, head) that a large step may have


@dataclass(frozen=True)
class DecodeSettings:
    """How the decode kernel is cut and launched.

    Attributes:
        tile: keys a step of the loop.
        warps: of a program.
        stages: of the software pipeline; stages - 1 buffers.
        num_resident: pieces counted on to run at once. A kernel of which six fit a processor took
            a quarter longer over four than one of which five fit; that they are spread unevenly
            under programmatic launch is a guess.
        max_tiles: the most tiles of a piece where the card is full anyway.
        prefetch: tiles fetched into L2 before the wait for the kernel ahead.
        merge: partials merged at a time.
        keys_first: start on the keys before the queries are there; takes registers.
        fp8_warps: over an fp8 cache, whose tiles are half as large; None: as many.
        fp8_stages: likewise.
    """

    tile: int
    warps: int
    stages: int
    num_resident: int
    max_tiles: int = 32
    prefetch: int = 0
    merge: int = 4
    keys_first: bool = False
    fp8_warps: int | None = None
    fp8_stages: int | None = None

    def pipeline(self, *, fp8: bool) -> tuple[int, int]:
        """Give the warps and the stages for a cache in fp8 or not."""
        if fp8:
            return self.fp8_warps or self.warps, self.fp8_stages or self.stages
        return self.warps, self.stages


@dataclass(frozen=True)
class PrefillSettings:
    """How a chunk kernel is cut and launched.

    Attributes:
        block_n: keys a step of the loop.
        stages: of the pipeline.
        warps: of a program.
    """

    block_n: int
    stages: int
    warps: int


def check(shape: AttentionShape) -> None:
    """Refuse what the kernels were not written for.

    Raises:
        ValueError: naming the value, what is possible and the way out.
    """
    group = shape.num_q_heads // shape.num_kv_heads
    if shape.dtype not in {torch.bfloat16, torch.float16}:
        raise ValueError(
            f"the triton attention backend computes in bfloat16 or float16, not {shape.dtype}; "
            "use attention_backend 'torch'"
        )
    if shape.head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim {shape.head_dim} is not one of {HEAD_DIMS}; use attention_backend 'torch'"
        )
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(
            f"{group} query heads a kv head are more than {MAX_GROUP}; "
            "use attention_backend 'torch'"
        )
    size = shape.block_size
    if size not in {16, 32} and (size < 64 or size % 64):
        raise ValueError(
            f"block_size {size} is not 16, 32 or a multiple of 64; use attention_backend 'torch'"
        )


def decode_settings(shape: AttentionShape, num_rows: int) -> DecodeSettings:
    """Choose by how the number of (row, kv head) items compares with the card.

    Few items: latency decides, so small programs, all at once, that start on their keys before
    anything else and merge in one round. Many: each streams on its own, and the more bytes in
    flight the better.
    """
    processors = num_multiprocessors(shape.device)
    items = num_rows * shape.num_kv_heads
    dim = next_power_of_2(shape.head_dim)
    members = next_power_of_2(shape.num_q_heads // shape.num_kv_heads)
    tile = 64 if dim <= 128 else 32
    room = max(1, 64 * 128 // (members * max(dim, 128)))  # partials that the registers hold
    narrow = members <= 8  # 16 columns take twice the registers of 8
    # Wide heads take the registers that keys_first wants; so do 16 columns beside several blocks.
    early = dim <= 128 and (narrow or shape.block_size >= tile)
    if 8 * items <= processors:
        merge = min(32, room)
        return DecodeSettings(32, 2, 2, 3 * processors, prefetch=1, merge=merge, keys_first=early)
    if items <= processors:
        merge, prefetch = min(8, room), 1 if early else 2
        stages, resident = (3, 3) if dim <= 128 else (2, 4)
        resident = 6 if dim <= 64 and narrow else resident
        return DecodeSettings(
            tile, 2, stages, resident * processors, prefetch=prefetch, merge=merge, keys_first=early
        )
    early = early and narrow
    if items <= 8 * processors:
        return DecodeSettings(
            tile,
            2,
            2,
            (4 if dim > 64 and narrow else 3) * processors,
            max_tiles=64,
            merge=min(4, room),
            keys_first=early,
            fp8_warps=2 if dim <= 128 else 4,
            fp8_stages=3,
        )
    return DecodeSettings(
        tile,
        4 if narrow or dim > 128 else 2,
        3,
        3 * processors,
        merge=min(2 if members <= 4 else 8, room),
        keys_first=early,
        fp8_warps=2 if dim <= 64 else None,
    )


def num_pieces(
    shape: AttentionShape, chosen: DecodeSettings, num_rows: int, max_context_len: int
) -> int:
    """Bound the pieces of a step, whatever the lengths: the grid and the size of the buffers."""
    items = num_rows * shape.num_kv_heads
    longest = max(1, -(-max_context_len // (chosen.max_tiles * chosen.tile)))
    resident = chosen.num_resident + (items // 2 if cuts_uneven(shape, num_rows) else 0)
    return max(resident, min(items * longest, items + SPLIT_PIECES))


def cuts_uneven(shape: AttentionShape, num_rows: int) -> bool:
    """Say whether the plan cuts the longer rows of uneven ones once more.

    Where items are about as many as programs run at once, a step would take as long as its longest
    row. With fewer items all rows are cut in many pieces, with more the hardware evens them out.
    """
    items, processors = num_rows * shape.num_kv_heads, num_multiprocessors(shape.device)
    return processors < items <= 8 * processors


def prefill_settings(shape: AttentionShape) -> PrefillSettings:
    """Choose for the kernel of any card: 128 rows, and what shared memory holds."""
    if next_power_of_2(shape.head_dim) <= 128:
        return PrefillSettings(block_n=64, stages=3, warps=8)
    return PrefillSettings(block_n=32, stages=2, warps=8)


def hopper_prefill_settings(shape: AttentionShape) -> PrefillSettings | None:
    """Choose for the kernel of Hopper cards; None where another must do.

    A block of keys lies in one cache block, and a key is a power of two of 16-bit elements.
    """
    head_dim, size = shape.head_dim, shape.block_size
    if size < 64 or head_dim not in {64, 128, 256}:
        return None
    block_n = 128 if size % 128 == 0 and head_dim <= 128 else 64
    return PrefillSettings(block_n, stages=256 * 128 // (block_n * head_dim), warps=4)
