"""Attention over paged keys and values with our Triton kernels: the `triton` backend.

Owns what is launched for a step. Never reads a length on the host: grids follow from
host bounds, so every launch can be captured in a CUDA graph.

Rows that decode go through the split kernel, chunk rows through the varlen kernel; both write
their rows of one output. A step of decode rows alone may come as the projection left it. Query
rows of no sequence, and of one with context_len 0, get zeros.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import triton

from nv_kernels.attention.triton_decode import (
    LOG2_E,
    PAIR_SCALE,
    Projected,
    Rotated,
    launch_decode,
    loaded,
)
from nv_kernels.attention.triton_plan import Buffers, TritonPlan, plan_decode, plan_prefill
from nv_kernels.kv import KVLayout
from nv_kernels.triton import settings
from nv_kernels.triton.dependent import dependent_launch, is_hopper
from nv_kernels.triton.prefill_attention import prefill_attention_kernel

if TYPE_CHECKING:
    from nv_kernels.attention.triton_plan import PrefillPlan
    from nv_kernels.kv import KVCache, Order
    from nv_kernels.metadata import AttentionMetadata, AttentionShape


@dataclass(frozen=True)
class TritonAttention:
    """The `triton` backend, on a CUDA card.

    Attributes:
        shape: what it was built for.
        reason: why it was picked.
        name: "triton".
        buffers: of plans and partial results.
    """

    shape: AttentionShape
    reason: str
    name: str = "triton"
    buffers: Buffers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check what the kernels cannot do.

        Raises:
            ValueError: a dtype, head_dim, group or block size that they were not written for.
        """
        settings.check(self.shape)
        object.__setattr__(self, "buffers", Buffers(self.shape.device))

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.shape.num_q_heads // self.shape.num_kv_heads

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Say how a layer's cache must lie in memory.

        Measured on an H100: 16-bit keys are as fast by token as by head, and "NHD" is what
        FlashAttention reads too; fp8 keys by token are rows of 128 bytes, 5 % slower.
        """
        shape = self.shape
        order: Order = "HND" if dtype == torch.float8_e4m3fn else "NHD"
        return KVLayout(
            num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype, order
        )

    def plan(self, metadata: AttentionMetadata) -> TritonPlan:
        """Cut the step's work on the device, once for all layers.

        The plan reads lengths and block tables that the stream has written by then, and shares
        its buffers with every plan of the same bounds: use it before the next `plan`.
        """
        shape, buffers = self.shape, self.buffers
        num_rows = metadata.context_lens.shape[0]
        decodes, chunks = metadata.num_decodes > 0, metadata.num_decodes < num_rows
        return TritonPlan(
            decode=plan_decode(shape, buffers, metadata) if decodes else None,
            prefill=plan_prefill(shape, buffers, metadata) if chunks else None,
        )

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: TritonPlan,
        scale: float,
    ) -> torch.Tensor:
        """Let each query see its own sequence up to itself.

        Args:
            q: [T, Hq, D], D contiguous. Row i of the first num_decodes belongs to sequence i.
            kv: the layer's cache, this step's tokens already stored; k and v strided alike.
            metadata: the step's.
            plan: what `plan` made of this metadata.
            scale: multiplies q.k; positive.

        Returns:
            [T, Hq, D] in q's dtype.
        """
        assert kv.k.stride() == kv.v.stride()
        assert kv.k.stride(3) == q.stride(2) == 1
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.decode is not None:
            launch_decode(self.shape, Rotated(q), kv, metadata, plan.decode, scale=scale, out=out)
        if plan.prefill is not None:
            self._prefill(q, kv, metadata, plan.prefill, scale=scale, out=out)
        elif q.shape[0] > metadata.num_decodes:
            out[metadata.num_decodes :].zero_()
        return out

    def attend_decode(  # noqa: PLR0917  the projection's own order
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        kv: KVCache,
        slot_mapping: torch.Tensor,
        metadata: AttentionMetadata,
        plan: TritonPlan,
        scale: float,
    ) -> torch.Tensor:
        """Norm, rotate, store and attend in one launch; see `FusedDecode`.

        Args:
            qkv: [S, (Hq + 2 Hkv) D], or [P, S, (Hq + 2 Hkv) D] partials, summed in fp32 in order.
            q_weight: [D], or None: no norm.
            k_weight: [D], None where q_weight is.
            eps: of both norms.
            cos_sin: [max_position, D] fp32, cosines then sines.
            kv: the layer's cache; k and v strided alike.
            slot_mapping: [S]; written at least two kernels ahead, as block tables are.
            metadata: the step's, of decode rows alone.
            plan: what `plan` made of this metadata.
            scale: multiplies q.k; positive.

        Returns:
            [S, Hq, D] in the shape's dtype.
        """
        assert (q_weight is None) == (k_weight is None), "both are normed or neither"
        assert kv.k.stride() == kv.v.stride()
        assert kv.k.stride(3) == qkv.stride(-1) == 1
        assert metadata.num_decodes == qkv.shape[-2] == metadata.context_lens.shape[0]
        shape = self.shape
        size = (qkv.shape[-2], shape.num_q_heads, shape.head_dim)
        out = torch.empty(size, dtype=shape.dtype, device=qkv.device)
        if plan.decode is not None:
            x = Projected(qkv, q_weight, k_weight, eps, cos_sin, slot_mapping)
            launch_decode(shape, x, kv, metadata, plan.decode, scale=scale, out=out)
        return out

    def _prefill(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: PrefillPlan,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        shape = self.shape
        tokens = settings.PREFILL_ROWS // self.group
        num_tokens = q.shape[0]
        num_tiles = triton.cdiv(num_tokens - metadata.num_decodes, tokens) + plan.num_rows
        grid = (num_tiles, shape.num_kv_heads)
        k, v, fp8 = loaded(kv)
        unit = PAIR_SCALE if fp8 else 1.0
        rest = (
            metadata.block_tables,
            out,
            plan.records,
            metadata.block_tables.stride(0),
            plan.num_records,
            num_tokens,
            scale * LOG2_E * kv.k_scale * unit,
            kv.v_scale * unit,
        )
        chosen = None if fp8 else settings.hopper_prefill_settings(shape)
        if chosen is not None and is_hopper(q):
            programs = min(math.prod(grid), settings.num_multiprocessors(shape.device))
            hopper = importlib.import_module("nv_kernels.triton.hopper_launch")
            hopper.launch(programs, (q, k, v), rest, chosen)
            return
        chosen = settings.prefill_settings(shape)
        prefill_attention_kernel[grid](
            q,
            k,
            v,
            *rest,
            GROUP=self.group,
            HEAD_DIM=shape.head_dim,
            DIM=triton.next_power_of_2(shape.head_dim),
            PAGE=shape.block_size,
            BLOCK_M=settings.PREFILL_ROWS,
            BLOCK_N=chosen.block_n,
            Q_TOKEN=q.stride(0),
            Q_HEAD=q.stride(1),
            KV_BLOCK=k.stride(0),
            KV_TOKEN=k.stride(1),
            KV_HEAD=k.stride(2),
            FP8=fp8,
            STAGES=chosen.stages,
            num_warps=chosen.warps,
            num_stages=chosen.stages,
            **dependent_launch(q),
        )
