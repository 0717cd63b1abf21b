"""Attention over paged keys and values with our Triton kernels: the `triton` backend.

Owns the launches of the attention kernels. Never reads a length on the host: grids follow from
host bounds, so a CUDA graph can capture every launch.

The decode kernel computes the decode rows, a chunk kernel the chunk rows; both write their rows of
one output. Query rows that belong to no sequence, or to one with context_len 0, become 0.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from nv_kernels.attention.triton import settings
from nv_kernels.attention.triton.decode import decode_attention_kernel
from nv_kernels.attention.triton.layout import card_layout
from nv_kernels.attention.triton.plan import Buffers, TritonPlan, plan_decode, plan_prefill
from nv_kernels.attention.triton.prefill import prefill_attention_kernel
from nv_kernels.attention.triton.scores import score_scale
from nv_kernels.attention.triton.widen import widen_kv
from nv_kernels.launch.card import converts_fp8, is_hopper, num_multiprocessors
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from collections.abc import Collection

    from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape, AttentionSpec
    from nv_kernels.attention.triton.plan import DecodePlan, PrefillPlan
    from nv_kernels.cache.layout import KVCache, KVLayout

PAIR_SCALE = 256.0  # the factor 2**8 that the kernels omit when they read e4m3
WIDENED_BYTES = 2**29  # bound on the 16-bit copy of the e4m3 keys and values of a step's chunk rows


def effective_window(metadata: AttentionMetadata, window: int | None) -> int | None:
    """Return the window, or None if it hides no key, so that the kernels need not look at it."""
    return None if window is None or metadata.max_context_len <= window else window


@dataclass(frozen=True)
class TritonAttention:
    """The `triton` backend, on a CUDA card.

    Attributes:
        shape: the shape of attention that it was built for.
        reason: why it was picked.
        name: "triton".
        buffers: for plans and partial results; on Hopper with an fp8 cache also 512 MiB, from the
            first prompt on, for keys and values in 16 bits.
    """

    is_capturable: ClassVar[bool] = True
    compiles: ClassVar[bool] = True

    shape: AttentionShape
    reason: str
    name: str = "triton"
    buffers: Buffers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the shape.

        Raises:
            ValueError: a dtype, head_dim, group or block size that the kernels do not support.
        """
        settings.check(self.shape)
        object.__setattr__(self, "buffers", Buffers(self.shape.device))

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.shape.num_q_heads // self.shape.num_kv_heads

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Return the layout that a layer's cache must have."""
        return card_layout(self.shape, num_blocks, dtype)

    def refusal(self, spec: AttentionSpec) -> None:
        """It computes every feature."""

    def plan(
        self, metadata: AttentionMetadata, windows: Collection[int | None] = (None,)
    ) -> dict[int | None, TritonPlan]:
        """Divide the step's work on the device, once for all its layers.

        The kernels read lengths and block tables on the device, in stream order. Windows that hide
        no key share a plan of the decode rows, and all windows that of the chunk rows. Steps with
        the same bounds share buffers: use the plans before the next call.
        """
        shape, buffers = self.shape, self.buffers
        effective = {window: effective_window(metadata, window) for window in windows}
        decodes = {
            window: plan_decode(shape, buffers, metadata, window)
            for window in dict.fromkeys(effective.values())
            if metadata.num_decodes > 0
        }
        chunks = metadata.num_decodes < metadata.context_lens.shape[0]
        prefill = plan_prefill(shape, buffers, metadata) if chunks else None
        return {
            asked: TritonPlan(decodes.get(window), prefill, window)
            for asked, window in effective.items()
        }

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: TritonPlan,
        spec: AttentionSpec,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each query to the keys of its own sequence, up to its own position.

        Args:
            q: [T, Hq, D], D contiguous. Row i of the first num_decodes belongs to sequence i. With
                an fp8 cache, queries are rounded to fp16: their absolute values must be below
                65,520, and those of normed queries are far below.
            kv: the layer's cache, as in the protocol; k and v have equal strides.
            metadata: the step's.
            plan: what `plan` returned for this metadata, at the spec's window.
            spec: how the layer attends.
            sinks: [Hq], if the spec has sinks.

        Returns:
            [T, Hq, D] in q's dtype.
        """
        assert plan.window == effective_window(metadata, spec.window)
        assert spec.sinks == (sinks is not None)
        assert kv.k.stride() == kv.v.stride()
        assert kv.k.stride(3) == q.stride(2) == 1
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        window = plan.window
        if plan.decode is not None:
            self._decode(q, kv, metadata, plan.decode, spec, window, sinks=sinks, out=out)
        if plan.prefill is not None:
            self._prefill(q, kv, metadata, plan.prefill, spec, window, sinks=sinks, out=out)
        elif q.shape[0] > metadata.num_decodes:
            out[metadata.num_decodes :].zero_()
        return out

    def _decode(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: DecodePlan,
        spec: AttentionSpec,
        window: int | None,
        *,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        k, v, fp8 = *kv.loaded(), kv.is_fp8
        convert = fp8 and converts_fp8(q)
        warps, stages = plan.settings.pipeline(fp8=fp8)
        unit = PAIR_SCALE if fp8 and not convert else 1.0
        shape = self.shape
        decode_attention_kernel[(plan.num_pieces,)](
            q,
            k,
            v,
            metadata.block_tables,
            out,
            plan.partials,
            plan.sums,
            plan.counters,
            plan.records,
            sinks,
            metadata.block_tables.stride(0),
            score_scale(spec) * kv.k_scale * unit,
            kv.v_scale * unit,
            NUM_KV_HEADS=shape.num_kv_heads,
            GROUP=self.group,
            HEAD_DIM=shape.head_dim,
            DIM=next_power_of_2(shape.head_dim),
            BLOCK_SIZE=shape.block_size,
            TILE=plan.settings.tile,
            Q_TOKEN=q.stride(0),
            Q_HEAD=q.stride(1),
            KV_BLOCK=k.stride(0),
            KV_TOKEN=k.stride(1),
            KV_HEAD=k.stride(2),
            FP8=fp8,
            STAGES=stages,
            MERGE=plan.settings.merge,
            PREFETCH=plan.settings.prefetch,
            KEYS_FIRST=plan.settings.keys_first,
            CONVERT=convert,
            WINDOW=window or 0,
            SOFTCAP=spec.softcap or 0.0,
            num_warps=warps,
            num_stages=stages,
            **dependent_launch(metadata.context_lens),
        )

    def _prefill(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: PrefillPlan,
        spec: AttentionSpec,
        window: int | None,
        *,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        shape = self.shape
        tokens = settings.PREFILL_ROWS // self.group
        num_tokens = q.shape[0]
        num_tiles = cdiv(num_tokens - metadata.num_decodes, tokens) + plan.num_rows
        grid = (num_tiles, shape.num_kv_heads)
        k, v, fp8 = *kv.loaded(), kv.is_fp8
        unit = PAIR_SCALE if fp8 else 1.0
        block_tables = metadata.block_tables
        # The Hopper kernel computes no feature: such layers take the kernel of every card.
        has_features = window is not None or spec.softcap is not None or spec.sinks
        every_card = has_features or not is_hopper(q)
        hopper = None if every_card else settings.hopper_prefill_settings(shape)
        if hopper is not None and fp8:
            widened = self._widen(k, v, metadata, q.dtype)
            if widened is None:
                hopper = None
            else:
                k, v, block_tables = widened
        rest = (
            block_tables,
            out,
            plan.records,
            block_tables.stride(0),
            plan.num_records,
            num_tokens,
            score_scale(spec) * kv.k_scale * unit,
            kv.v_scale * unit,
        )
        if hopper is not None:
            programs = min(math.prod(grid), num_multiprocessors(shape.device))
            module = importlib.import_module("nv_kernels.attention.triton.hopper_launch")
            module.launch(programs, (q, k, v), rest, hopper)
            return
        chosen = settings.prefill_settings(shape)
        prefill_attention_kernel[grid](
            q,
            k,
            v,
            *rest,
            sinks,
            GROUP=self.group,
            HEAD_DIM=shape.head_dim,
            DIM=next_power_of_2(shape.head_dim),
            BLOCK_SIZE=shape.block_size,
            BLOCK_M=settings.PREFILL_ROWS,
            BLOCK_N=chosen.block_n,
            Q_TOKEN=q.stride(0),
            Q_HEAD=q.stride(1),
            KV_BLOCK=k.stride(0),
            KV_TOKEN=k.stride(1),
            KV_HEAD=k.stride(2),
            FP8=fp8,
            STAGES=chosen.stages,
            WINDOW=window or 0,
            SOFTCAP=spec.softcap or 0.0,
            num_warps=chosen.warps,
            num_stages=chosen.stages,
            **dependent_launch(q),
        )

    def _widen(
        self, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Copy the chunk rows' e4m3 into 16-bit blocks with a table; None if that is too large."""
        shape, num_rows = self.shape, metadata.context_lens.shape[0]
        width = cdiv(metadata.max_context_len, shape.block_size)
        inner = (shape.num_kv_heads, shape.block_size, shape.head_dim)
        num_blocks = (num_rows - metadata.num_decodes) * width
        room = WIDENED_BYTES // (2 * 2 * math.prod(inner))
        # Allocated at the first prompt, whatever its size, because an engine measures memory then.
        blocks = self.buffers.get("widened", 2 * room * math.prod(inner), dtype)
        if num_blocks > room:
            return None
        wide_k, wide_v = blocks.view(2, room, *inner)[:, :num_blocks]
        size = next_power_of_2(num_rows * width)
        tables = self.buffers.get("widened tables", size, torch.int32)
        tables = tables[: num_rows * width].view(num_rows, width)
        widen_kv(k, v, metadata, wide_k, wide_v, tables)
        return wide_k.transpose(1, 2), wide_v.transpose(1, 2), tables
