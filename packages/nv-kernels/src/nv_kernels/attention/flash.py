"""Attention over paged keys and values with the FlashAttention packages: `flash_attn`.

Owns how a step is split: decode rows are one call of one query each, which cuts long contexts over
the card, chunk rows another over cumulative lengths. Never reads a length on the host, so a step
can be captured in a CUDA graph, and never calls a package itself: `flash_packages` does.

The packages give zeros to a sequence without a context, and do not write query rows of no
sequence. Their launches are not Triton's: `compile_ahead` does not hold them back, and inside it
lengths and tables are undefined, so a step must not run there.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import pad

from nv_kernels.attention.flash_packages import Chunks, Rows, find
from nv_kernels.cache.layout import KVLayout

if TYPE_CHECKING:
    from nv_kernels.attention.flash_packages import Package
    from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape
    from nv_kernels.cache.layout import KVCache


@dataclass(frozen=True)
class FlashPlan:
    """A step's two calls.

    Attributes:
        decodes: rows of one query, None without any.
        chunks: the others, None without any.
    """

    decodes: Rows | None
    chunks: Chunks | None


@dataclass(frozen=True)
class FlashAttention:
    """The `flash_attn` backend, on a CUDA card of compute capability 8.0 or more.

    Attributes:
        shape: what it was built for.
        reason: why it was picked, and which package it uses.
        name: "flash_attn".
        package: what it calls.
    """

    is_capturable: ClassVar[bool] = True
    compiles: ClassVar[bool] = False

    shape: AttentionShape
    reason: str
    name: str = "flash_attn"
    package: Package = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Find a package and check what it cannot do.

        Raises:
            ValueError: no package can be imported, or a dtype, head_dim, block size or card that
                the one found does not take.
        """
        package = find(self.shape)
        object.__setattr__(self, "package", package)
        object.__setattr__(self, "reason", f"{self.reason}; {package.title}")

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Lay a token's heads side by side, as both packages read them.

        Raises:
            ValueError: a dtype other than the queries'.
        """
        shape = self.shape
        if dtype != shape.dtype:
            raise ValueError(
                f"attention backend 'flash_attn' keeps keys and values in the queries' dtype "
                f"{shape.dtype}, not {dtype}; use 'triton' for an fp8 cache"
            )
        return KVLayout(
            num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype, "NHD"
        )

    def plan(self, metadata: AttentionMetadata) -> FlashPlan:
        """Split the step into decode rows and chunk rows, once for all layers."""
        count = metadata.num_decodes
        width = -(-metadata.max_context_len // self.shape.block_size)
        lengths, tables = metadata.context_lens, metadata.block_tables[:, : max(width, 1)]
        decodes = Rows(lengths[:count], tables[:count]) if count else None
        if count == lengths.shape[0]:
            return FlashPlan(decodes, None)
        sums = lengths[count:].cumsum(0, dtype=torch.int32)
        chunks = Chunks(
            Rows(lengths[count:], tables[count:]),
            metadata.query_start[count:] - count,
            pad(sums, (1, 0)),
            metadata.max_query_len,
            metadata.max_context_len,
        )
        return FlashPlan(decodes, chunks)

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: FlashPlan,
        scale: float,
    ) -> torch.Tensor:
        """Let each query see its own sequence up to itself.

        Args:
            q: [T, Hq, D], D contiguous. Row i of the first num_decodes belongs to sequence i.
            kv: a cache of this backend's layout, finite everywhere.
            metadata: the step's.
            plan: what `plan` made of it.
            scale: multiplies q.k.

        Returns:
            [T, Hq, D] in q's dtype; rows that see nothing are 0.
        """
        assert kv.k_scale == kv.v_scale == 1.0
        count = metadata.num_decodes
        if plan.chunks is None and plan.decodes is not None and q.shape[0] == count:
            return self.package.decode(q, kv, plan.decodes, scale)
        if plan.chunks is not None and plan.decodes is None:
            return _owned(self.package.chunks(q, kv, plan.chunks, scale), metadata.query_start)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if plan.decodes is not None:
            out[:count] = self.package.decode(q[:count], kv, plan.decodes, scale)
        if plan.chunks is not None:
            chunks = self.package.chunks(q[count:], kv, plan.chunks, scale)
            out[count:] = _owned(chunks, plan.chunks.query_start)
        return out


def _owned(out: torch.Tensor, query_start: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the rows of [T, Hq, D] past the last sequence's."""
    end = query_start[-1]
    if out.is_cuda:
        importlib.import_module("nv_kernels.attention.triton.zero_tail").zero_tail(out, end)
        return out
    rows = torch.arange(out.shape[0], device=out.device)
    return out.masked_fill_((rows >= end)[:, None, None], 0.0)
