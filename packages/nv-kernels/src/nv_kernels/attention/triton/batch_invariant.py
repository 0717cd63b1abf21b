"""Batch-invariant attention on a card: one kernel for all rows, with dots of one shape.

Owns the launches and the few sizes that the arithmetic depends on. Never reads a length on the
host: grids follow from host bounds, so a CUDA graph can capture every launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from nv_kernels.attention.triton.batch_invariant_kernel import (
    batch_invariant_attention_kernel,
    merge_splits_kernel,
)
from nv_kernels.attention.triton.layout import card_layout
from nv_kernels.attention.triton.plan import Buffers, plan_prefill
from nv_kernels.attention.triton.scores import score_scale
from nv_kernels.launch.card import num_multiprocessors
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from collections.abc import Collection

    from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape, AttentionSpec
    from nv_kernels.attention.triton.plan import PrefillPlan
    from nv_kernels.cache.layout import KVCache, KVLayout

PAIR_SCALE = 256.0  # the factor 2**8 that the kernel omits when it reads e4m3
MAX_HEAD_DIM = 256
MAX_GROUP = 16
MAX_PARTIALS = 2**26  # elements; a step that needs more is not spread
RESIDENT = 4  # programs per multiprocessor up to which spreading pays


@dataclass(frozen=True)
class Tiles:
    """The sizes that determine the result's last bits. They follow from the shape, not the step.

    Attributes:
        rows: query heads of a tile.
        keys: keys of a tile.
        split: keys per split; each split has its own softmax.
        warps: warps per program.
        stages: stages of the software pipeline.
    """

    rows: int
    keys: int
    split: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Spread:
    """How a step's decode rows are spread over programs. The result does not depend on it.

    Attributes:
        width: programs per row and kv head.
        max_splits: a bound on the splits per row.
        partials: [rows, max_splits, Hq, D padded] fp32.
        sums: [2, rows, max_splits, Hq] fp32.
    """

    width: int
    max_splits: int
    partials: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True)
class BatchInvariantPlan:
    """The plan of a step.

    Attributes:
        spread: of the decode rows.
        prefill: of the chunk rows; None if there are none.
        window: keys that a query reads at most; None: all.
    """

    spread: Spread
    prefill: PrefillPlan | None
    window: int | None


@dataclass(frozen=True)
class BatchInvariantTritonAttention:
    """The `batch_invariant` backend, on a CUDA card.

    Attributes:
        shape: the shape of attention that it was built for.
        reason: why it was picked.
        name: "batch_invariant".
        buffers: of plans and partial results.
    """

    is_capturable: ClassVar[bool] = True
    compiles: ClassVar[bool] = True

    shape: AttentionShape
    reason: str
    name: str = "batch_invariant"
    buffers: Buffers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the shape.

        Raises:
            ValueError: a head_dim, group or block size that the kernel does not support.
        """
        shape, group = self.shape, self.group
        if shape.head_dim > MAX_HEAD_DIM or shape.head_dim % 16:
            raise ValueError(
                f"head_dim is {shape.head_dim}: batch-invariant attention on a card needs a "
                f"multiple of 16 up to {MAX_HEAD_DIM}; leave deterministic at False"
            )
        if group > MAX_GROUP:
            raise ValueError(
                f"query heads per kv head is {group}: batch-invariant attention on a card needs at "
                f"most {MAX_GROUP}; leave deterministic at False"
            )
        size = shape.block_size
        if size not in {16, 32} and (size < 64 or size % 64):
            raise ValueError(f"block_size is {size}: it must be 16, 32 or a multiple of 64")
        object.__setattr__(self, "buffers", Buffers(shape.device))

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.shape.num_q_heads // self.shape.num_kv_heads

    @property
    def tiles(self) -> Tiles:
        """The sizes for this shape."""
        wide = self.shape.head_dim > 128
        if self.shape.dtype == torch.float32:
            return Tiles(rows=16, keys=16 if wide else 32, split=256, warps=4, stages=2)
        if wide:
            return Tiles(rows=64, keys=32, split=256, warps=8, stages=2)
        keys = 64 if self.shape.head_dim <= 64 else 32  # more keys would not fit the registers
        return Tiles(rows=64, keys=keys, split=256, warps=4, stages=3)

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Return the layout that a layer's cache must have: that of the `triton` backend."""
        return card_layout(self.shape, num_blocks, dtype)

    def refusal(self, spec: AttentionSpec) -> None:
        """It computes every feature."""

    def plan(
        self, metadata: AttentionMetadata, windows: Collection[int | None] = (None,)
    ) -> dict[int | None, BatchInvariantPlan]:
        """List the step's query tiles on the device, once for all its layers.

        Steps share buffers: use the plans before the next call.
        """
        chunks = metadata.num_decodes < metadata.context_lens.shape[0]
        prefill = None
        if chunks:
            prefill = plan_prefill(self.shape, self.buffers, metadata, self.tiles.rows)
        return {
            window: BatchInvariantPlan(self._spread(metadata, window), prefill, window)
            for window in windows
        }

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: BatchInvariantPlan,
        spec: AttentionSpec,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each query to the keys of its own sequence, up to its own position.

        Args:
            q: [T, Hq, D], D contiguous. Row i of the first num_decodes belongs to sequence i.
            kv: the layer's cache, with this step's tokens stored; k and v have equal strides.
            metadata: the step's.
            plan: what `plan` returned for this metadata.
            spec: how the layer attends.
            sinks: [Hq], if the spec has sinks.

        Returns:
            [T, Hq, D] in q's dtype.
        """
        assert plan.window == spec.window
        assert spec.sinks == (sinks is not None)
        assert kv.k.stride() == kv.v.stride()
        assert kv.k.stride(3) == q.stride(2) == 1
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_decodes, spread = metadata.num_decodes, plan.spread
        self._launch(q, kv, metadata, plan, spec, sinks=sinks, out=out)
        if num_decodes and spread.width > 1:
            merge_splits_kernel[num_decodes, self.shape.num_kv_heads](
                metadata.context_lens,
                spread.partials,
                spread.sums,
                sinks,
                out,
                num_decodes,
                spread.max_splits,
                kv.v_scale * _unit(kv),
                GROUP=self.group,
                HEAD_DIM=self.shape.head_dim,
                DIM=next_power_of_2(self.shape.head_dim),
                SPLIT=self.tiles.split,
                WINDOW=spec.window or 0,
                num_warps=4,
                **dependent_launch(q),
            )
        if plan.prefill is None and q.shape[0] > num_decodes:
            out[num_decodes:].zero_()
        return out

    def _spread(self, metadata: AttentionMetadata, window: int | None) -> Spread:
        """Spread decode rows over more programs if one per row would not fill the card."""
        shape, rows = self.shape, metadata.num_decodes
        longest = metadata.max_context_len
        if window is not None:  # it may begin at the last key of a split
            longest = min(longest, window + self.tiles.split - 1)
        max_splits = max(1, cdiv(longest, self.tiles.split))
        wanted = RESIDENT * num_multiprocessors(shape.device)
        width = min(max_splits, max(1, wanted // max(1, rows * shape.num_kv_heads)))
        size = rows * max_splits * shape.num_q_heads
        dim = next_power_of_2(shape.head_dim)
        if width == 1 or size * dim > MAX_PARTIALS:
            width, size = 1, 1
        room = next_power_of_2(size)
        return Spread(
            width=width,
            max_splits=max_splits,
            partials=self.buffers.get("partials", room * dim, torch.float32),
            sums=self.buffers.get("sums", 2 * room, torch.float32),
        )

    def _launch(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: BatchInvariantPlan,
        spec: AttentionSpec,
        *,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        shape, tiles, spread, prefill = self.shape, self.tiles, plan.spread, plan.prefill
        num_tokens, num_decodes = q.shape[0], metadata.num_decodes
        items = num_decodes * spread.width
        if prefill is not None:
            tokens = tiles.rows // self.group
            items += cdiv(num_tokens - num_decodes, tokens) + prefill.num_rows
        if not items:
            return
        k, v = kv.loaded()
        batch_invariant_attention_kernel[items, shape.num_kv_heads](
            q,
            k,
            v,
            metadata.block_tables,
            metadata.context_lens,
            metadata.context_lens if prefill is None else prefill.records,
            out,
            spread.partials,
            spread.sums,
            sinks,
            metadata.block_tables.stride(0),
            num_decodes,
            spread.width,
            spread.max_splits,
            0 if prefill is None else prefill.num_records,
            num_tokens,
            score_scale(spec) * kv.k_scale * _unit(kv),
            kv.v_scale * _unit(kv),
            GROUP=self.group,
            HEAD_DIM=shape.head_dim,
            DIM=next_power_of_2(shape.head_dim),
            BLOCK_SIZE=shape.block_size,
            BLOCK_M=tiles.rows,
            TILE=tiles.keys,
            SPLIT=tiles.split,
            Q_TOKEN=q.stride(0),
            Q_HEAD=q.stride(1),
            KV_BLOCK=k.stride(0),
            KV_TOKEN=k.stride(1),
            KV_HEAD=k.stride(2),
            FP8=kv.is_fp8,
            STAGES=tiles.stages,
            WINDOW=spec.window or 0,
            SOFTCAP=spec.softcap or 0.0,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **dependent_launch(q),
        )


def _unit(kv: KVCache) -> float:
    return PAIR_SCALE if kv.is_fp8 else 1.0
