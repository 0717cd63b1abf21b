"""The plan that the Triton backend makes once per step, on the device, for all layers.

Owns the plans, their buffers and the launches of the plan kernels. Never reads a length on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nv_kernels.attention.triton import settings
from nv_kernels.attention.triton.decode_plan import RECORD, decode_plan_kernel
from nv_kernels.attention.triton.prefill_plan import prefill_plan_kernel
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape


@dataclass(frozen=True)
class DecodePlan:
    """The pieces of a step's decode rows, on the device.

    Attributes:
        settings: the launch settings of the decode kernel.
        num_rows: decode rows.
        num_pieces: number of records, a bound on the pieces.
        records: [num_pieces, 8] int32 (see nv_kernels.attention.triton.decode_plan).
        counters: [num_pieces] int32, finished pieces of each item; 0 between launches.
        partials: [num_pieces, group, D padded] fp32.
        sums: [num_pieces, group] fp32.
    """

    settings: settings.DecodeSettings
    num_rows: int
    num_pieces: int
    records: torch.Tensor
    counters: torch.Tensor
    partials: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True)
class PrefillPlan:
    """The query tiles of a step's chunk rows, on the device.

    Attributes:
        num_rows: chunk rows.
        num_records: a bound on the tiles.
        records: [1 + num_records, 8] int32 (see nv_kernels.attention.triton.prefill_plan).
    """

    num_rows: int
    num_records: int
    records: torch.Tensor


@dataclass(frozen=True)
class TritonPlan:
    """The plan of a step.

    Attributes:
        decode: of the decode rows; None if there are none.
        prefill: of the chunk rows; None if there are none.
        window: keys that a query reads at most; None: all, also where no context of the step can be
            longer than the layers' window.
    """

    decode: DecodePlan | None
    prefill: PrefillPlan | None
    window: int | None


@dataclass(frozen=True)
class Buffers:
    """A backend's device memory besides the cache, kept for the lifetime of the backend.

    There is one tensor per purpose and size, and sizes are powers of two, so that steps of one
    bucket, and the graphs captured with them, share theirs. Steps must run in order on one stream.

    Attributes:
        device: the card.
        tensors: by purpose and size.
    """

    device: torch.device
    tensors: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict, repr=False)

    def get(self, purpose: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer of this purpose with `size` elements, zeroed when it is new."""
        key = (purpose, size)
        if key not in self.tensors:
            self.tensors[key] = torch.zeros(size, dtype=dtype, device=self.device)
        return self.tensors[key]


def plan_decode(
    shape: AttentionShape, buffers: Buffers, metadata: AttentionMetadata, window: int | None = None
) -> DecodePlan:
    """Divide the first num_decodes rows into pieces.

    A step's plans of several windows exist at the same time: each has records of its own. Partial
    results and counters are in use only while a layer attends.
    """
    rows = metadata.num_decodes
    chosen = settings.decode_settings(shape, rows)
    longest = metadata.max_context_len
    if window is not None:  # it may begin at the last key of a tile
        longest = min(longest, window + chosen.tile - 1)
    num_pieces = settings.num_pieces(shape, chosen, rows, longest)
    room = next_power_of_2(num_pieces)
    group = shape.num_q_heads // shape.num_kv_heads
    dim = next_power_of_2(shape.head_dim)
    plan = DecodePlan(
        settings=chosen,
        num_rows=rows,
        num_pieces=num_pieces,
        records=buffers.get(f"decode records of window {window}", room * RECORD, torch.int32),
        counters=buffers.get("decode counters", room, torch.int32),
        partials=buffers.get("partials", room * group * dim, torch.float32),
        sums=buffers.get("sums", room * group, torch.float32),
    )
    decode_plan_kernel[(rows,)](
        metadata.context_lens,
        metadata.block_tables,
        plan.records,
        plan.counters,
        metadata.block_tables.stride(0),
        rows,
        num_pieces,
        chosen.num_resident,
        ROWS=_rows_bound(rows),
        TILE=chosen.tile,
        BLOCK_SIZE=shape.block_size,
        NUM_KV_HEADS=shape.num_kv_heads,
        MERGE=chosen.merge,
        MAX_TILES=chosen.max_tiles,
        CUT_UNEVEN=settings.cuts_uneven(shape, rows),
        CHUNK=128,
        WINDOW=window or 0,
        num_warps=4,
        **dependent_launch(metadata.context_lens),
    )
    return plan


def plan_prefill(
    shape: AttentionShape,
    buffers: Buffers,
    metadata: AttentionMetadata,
    tile_rows: int = settings.PREFILL_ROWS,
) -> PrefillPlan:
    """List the tiles, of tile_rows query heads each, of the rows after the first num_decodes."""
    num_rows = metadata.context_lens.shape[0] - metadata.num_decodes
    tokens = tile_rows // (shape.num_q_heads // shape.num_kv_heads)
    num_records = num_rows * cdiv(metadata.max_query_len, tokens)
    room = next_power_of_2(num_records + 1)
    records = buffers.get("prefill records", room * RECORD, torch.int32)
    rows_bound = _rows_bound(num_rows)
    prefill_plan_kernel[(num_rows,)](
        metadata.query_start,
        metadata.context_lens,
        records,
        metadata.num_decodes,
        num_rows,
        ROWS=rows_bound,
        TOKENS=tokens,
        CHUNK=max(4, 4096 // rows_bound),
        num_warps=4,
        **dependent_launch(metadata.context_lens),
    )
    return PrefillPlan(num_rows, num_records, records)


def _rows_bound(rows: int) -> int:
    """Round up to one of few sizes, because each size compiles another kernel."""
    return 16 if rows <= 16 else 128 if rows <= 128 else max(1024, next_power_of_2(rows))
