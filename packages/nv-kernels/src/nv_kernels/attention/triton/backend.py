"""Attention over paged keys and values with our Triton kernels: the `triton` backend.

Owns the launches of both attention kernels. Never reads a length on the host: grids follow from
host bounds, so every launch can be captured in a CUDA graph.

Rows that decode go through the split kernel, chunk rows through the varlen kernel; both write
their rows of one output. Query rows of no sequence, and of one with context_len 0, get zeros.
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
from nv_kernels.attention.triton.widen import widen_kv
from nv_kernels.launch.card import converts_fp8, is_hopper, num_multiprocessors
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape
    from nv_kernels.attention.triton.plan import DecodePlan, PrefillPlan
    from nv_kernels.cache.layout import KVCache, KVLayout

LOG2_E = math.log2(math.e)
PAIR_SCALE = 256.0  # the 2**8 that the kernels' reading of e4m3 leaves out
WIDENED_BYTES = 2**29  # of the e4m3 that a step's chunk rows see, copied to 16 bits


@dataclass(frozen=True)
class TritonAttention:
    """The `triton` backend, on a CUDA card.

    Attributes:
        shape: what it was built for.
        reason: why it was picked.
        name: "triton".
        buffers: of plans and partial results; on Hopper, over an fp8 cache, also 512 MiB from the
            first prompts on, for their keys and values in 16 bits.
    """

    is_capturable: ClassVar[bool] = True
    compiles: ClassVar[bool] = True

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
        """Say how a layer's cache must lie in memory."""
        return card_layout(self.shape, num_blocks, dtype)

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
            q: [T, Hq, D], D contiguous. Row i of the first num_decodes belongs to sequence i. Over
                an fp8 cache queries are rounded to fp16: below 65,520 in size, and normalised ones
                are far below.
            kv: the layer's cache, as the protocol says; k and v strided alike.
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
            self._decode(q, kv, metadata, plan.decode, scale=scale, out=out)
        if plan.prefill is not None:
            self._prefill(q, kv, metadata, plan.prefill, scale=scale, out=out)
        elif q.shape[0] > metadata.num_decodes:
            out[metadata.num_decodes :].zero_()
        return out

    def _decode(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: DecodePlan,
        *,
        scale: float,
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
            metadata.block_tables.stride(0),
            scale * LOG2_E * kv.k_scale * unit,
            kv.v_scale * unit,
            NUM_KV_HEADS=shape.num_kv_heads,
            GROUP=self.group,
            HEAD_DIM=shape.head_dim,
            DIM=next_power_of_2(shape.head_dim),
            PAGE=shape.block_size,
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
        *,
        scale: float,
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
        hopper = settings.hopper_prefill_settings(shape) if is_hopper(q) else None
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
            scale * LOG2_E * kv.k_scale * unit,
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
            GROUP=self.group,
            HEAD_DIM=shape.head_dim,
            DIM=next_power_of_2(shape.head_dim),
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

    def _widen(
        self, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Copy the chunk rows' e4m3 into 16-bit blocks with a table; None if they are too many."""
        shape, num_rows = self.shape, metadata.context_lens.shape[0]
        width = cdiv(metadata.max_context_len, shape.block_size)
        inner = (shape.num_kv_heads, shape.block_size, shape.head_dim)
        num_blocks = (num_rows - metadata.num_decodes) * width
        room = WIDENED_BYTES // (2 * 2 * math.prod(inner))
        # Made at the first prompts, whatever their size: an engine measures memory then.
        blocks = self.buffers.get("widened", 2 * room * math.prod(inner), dtype)
        if num_blocks > room:
            return None
        wide_k, wide_v = blocks.view(2, room, *inner)[:, :num_blocks]
        size = next_power_of_2(num_rows * width)
        tables = self.buffers.get("widened tables", size, torch.int32)
        tables = tables[: num_rows * width].view(num_rows, width)
        widen_kv(k, v, metadata, wide_k, wide_v, tables)
        return wide_k.transpose(1, 2), wide_v.transpose(1, 2), tables
