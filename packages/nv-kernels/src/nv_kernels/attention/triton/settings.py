"""Launch settings of the attention kernels, chosen from host bounds.

Owns the tables of tile sizes, warps and stages, measured on an H100
(benchmarks/kernels_attention.py), and the shapes that the kernels support.
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
PREFILL_ROWS = 128  # rows of a query tile: tokens times the group's heads
SPLIT_PIECES = 4096  # pieces that a large step may have beyond one per (row, head)


@dataclass(frozen=True)
class DecodeSettings:
    """How the decode kernel's work is divided and launched.

    Attributes:
        tile: keys per iteration of the loop.
        warps: warps per program.
        stages: stages of the software pipeline, with stages - 1 buffers.
        num_resident: pieces that are assumed to run at once. With four per processor, a kernel of
            which six fit a processor took a quarter longer than one of which five fit; perhaps
            programmatic launch spreads them unevenly.
        max_tiles: the most tiles of a piece where the card is full anyway.
        prefetch: tiles fetched into L2 before the wait for the previous kernel.
        merge: partials merged at a time.
        keys_first: load the keys before the queries; this needs more registers.
        fp8_warps: warps for an fp8 cache, whose tiles are half as large; None: `warps`.
        fp8_stages: stages for an fp8 cache; None: `stages`.
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
        """Return the warps and the stages for a cache, in fp8 or not."""
        if fp8:
            return self.fp8_warps or self.warps, self.fp8_stages or self.stages
        return self.warps, self.stages


@dataclass(frozen=True)
class PrefillSettings:
    """How a chunk kernel's work is divided and launched.

    Attributes:
        block_n: keys per iteration of the loop.
        stages: stages of the pipeline.
        warps: warps per program.
    """

    block_n: int
    stages: int
    warps: int


def check(shape: AttentionShape) -> None:
    """Check a shape.

    Raises:
        ValueError: the kernels do not support the dtype, head_dim, group or block size.
    """
    group = shape.num_q_heads // shape.num_kv_heads
    if shape.dtype not in {torch.bfloat16, torch.float16}:
        raise ValueError(
            f"dtype is {shape.dtype}: attention backend 'triton' takes bfloat16 or float16; "
            "use attention_backend 'torch'"
        )
    if shape.head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim is {shape.head_dim}: it must be one of {HEAD_DIMS}; "
            "use attention_backend 'torch'"
        )
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(
            f"query heads per kv head is {group}: it must be at most {MAX_GROUP}; "
            "use attention_backend 'torch'"
        )
    size = shape.block_size
    if size not in {16, 32} and (size < 64 or size % 64):
        raise ValueError(
            f"block_size is {size}: it must be 16, 32 or a multiple of 64; "
            "use attention_backend 'torch'"
        )


def decode_settings(shape: AttentionShape, num_rows: int) -> DecodeSettings:
    """Choose by the number of (row, kv head) items relative to the size of the card.

    With few items latency matters: small programs, all resident, load their keys first and merge
    in one round. With many items bandwidth matters: each program keeps many bytes in flight.
    """
    processors = num_multiprocessors(shape.device)
    items = num_rows * shape.num_kv_heads
    dim = next_power_of_2(shape.head_dim)
    members = next_power_of_2(shape.num_q_heads // shape.num_kv_heads)
    tile = 64 if dim <= 128 else 32
    room = max(1, 64 * 128 // (members * max(dim, 128)))  # partials that fit the registers
    narrow = members <= 8  # 16 columns need twice the registers of 8
    # Wide heads need the registers of keys_first; so do 16 columns with several blocks per tile.
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
    """Bound the pieces of a step for all lengths: the grid and the size of the buffers."""
    items = num_rows * shape.num_kv_heads
    longest = max(1, -(-max_context_len // (chosen.max_tiles * chosen.tile)))
    resident = chosen.num_resident + (items // 2 if cuts_uneven(shape, num_rows) else 0)
    return max(resident, min(items * longest, items + SPLIT_PIECES))


def cuts_uneven(shape: AttentionShape, num_rows: int) -> bool:
    """Return whether the plan splits rows again that are longer than the others.

    If about as many items as programs run at once, a step takes as long as its longest row. With
    fewer items all rows have many pieces; with more items the hardware balances them.
    """
    items, processors = num_rows * shape.num_kv_heads, num_multiprocessors(shape.device)
    return processors < items <= 8 * processors


def prefill_settings(shape: AttentionShape) -> PrefillSettings:
    """Choose for the kernel of every card: 128 rows, and as many stages as fit shared memory."""
    if next_power_of_2(shape.head_dim) <= 128:
        return PrefillSettings(block_n=64, stages=3, warps=8)
    return PrefillSettings(block_n=32, stages=2, warps=8)


def hopper_prefill_settings(shape: AttentionShape) -> PrefillSettings | None:
    """Choose for the kernel of Hopper cards; None if it does not support the shape.

    A block of keys must lie in one cache block, and a key must be a power of two of 16-bit
    elements.
    """
    head_dim, size = shape.head_dim, shape.block_size
    if size < 64 or head_dim not in {64, 128, 256}:
        return None
    block_n = 128 if size % 128 == 0 and head_dim <= 128 else 64
    return PrefillSettings(block_n, stages=256 * 128 // (block_n * head_dim), warps=4)
