"""Attention over paged keys and values with the FlashAttention packages: `flash_attn`.

Owns how a step is split: decode rows are one call with one query each, which spreads long contexts
over the card; chunk rows are another call, with cumulative lengths. Never reads a length on the
host, so a CUDA graph can capture a step. Never calls a package itself: `flash_packages` does.

The packages write zeros for a sequence without a context, and do not write query rows that belong
to no sequence. Triton does not launch them, so `compile_ahead` does not suppress them; lengths and
tables are undefined inside it, so a step must not run there.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import pad

from nv_kernels.attention.flash_packages import Chunks, Rows, find, refusal
from nv_kernels.cache.layout import KVLayout

if TYPE_CHECKING:
    from collections.abc import Collection

    from nv_kernels.attention.flash_packages import Package
    from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape, AttentionSpec
    from nv_kernels.cache.layout import KVCache


@dataclass(frozen=True)
class FlashPlan:
    """A step's two calls.

    Attributes:
        decodes: rows with one query; None if there are none.
        chunks: the other rows; None if there are none.
    """

    decodes: Rows | None
    chunks: Chunks | None


@dataclass(frozen=True)
class FlashAttention:
    """The `flash_attn` backend, on a CUDA card of compute capability 8.0 or more.

    Attributes:
        shape: the shape of attention that it was built for.
        reason: why it was picked, and which package it uses.
        name: "flash_attn".
        package: the package that it calls.
    """

    is_capturable: ClassVar[bool] = True
    compiles: ClassVar[bool] = False

    shape: AttentionShape
    reason: str
    name: str = "flash_attn"
    package: Package = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Find a package that supports this shape.

        Raises:
            ValueError: no package can be imported, or the one found does not support the
                dtype, head_dim, block size or card.
        """
        package = find(self.shape)
        object.__setattr__(self, "package", package)
        object.__setattr__(self, "reason", f"{self.reason}; {package.title}")

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Store a token's heads side by side, as both packages read them.

        Raises:
            ValueError: a dtype other than the queries'.
        """
        shape = self.shape
        if dtype != shape.dtype:
            raise ValueError(
                f"KV cache dtype is {dtype}: 'flash_attn' needs that of the queries, "
                f"{shape.dtype}; use 'triton' for an fp8 cache"
            )
        return KVLayout(
            num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype, "NHD"
        )

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Return why the package cannot compute layers of a spec; None if it can."""
        return refusal(self.package, spec)

    def plan(
        self, metadata: AttentionMetadata, windows: Collection[int | None] = (None,)
    ) -> dict[int | None, FlashPlan]:
        """Split the step into decode rows and chunk rows, once for all layers."""
        count = metadata.num_decodes
        width = -(-metadata.max_context_len // self.shape.block_size)
        lengths, tables = metadata.context_lens, metadata.block_tables[:, : max(width, 1)]
        decodes = Rows(lengths[:count], tables[:count]) if count else None
        chunks = None
        if count < lengths.shape[0]:
            sums = lengths[count:].cumsum(0, dtype=torch.int32)
            chunks = Chunks(
                Rows(lengths[count:], tables[count:]),
                metadata.query_start[count:] - count,
                pad(sums, (1, 0)),
                metadata.max_query_len,
                metadata.max_context_len,
            )
        return dict.fromkeys(windows, FlashPlan(decodes, chunks))

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: FlashPlan,
        spec: AttentionSpec,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each query to the keys of its own sequence, up to its own position.

        Args:
            q: [T, Hq, D], D contiguous. Row i of the first num_decodes belongs to sequence i.
            kv: a cache of this backend's layout, finite everywhere.
            metadata: the step's.
            plan: what `plan` returned for it.
            spec: how the layer attends.
            sinks: None: `refusal` names them.

        Returns:
            [T, Hq, D] in q's dtype; rows without keys are 0.
        """
        assert kv.k_scale == kv.v_scale == 1.0
        assert sinks is None
        count = metadata.num_decodes
        if plan.chunks is None and plan.decodes is not None and q.shape[0] == count:
            return self.package.decode(q, kv, plan.decodes, spec)
        if plan.chunks is not None and plan.decodes is None:
            return _owned(self.package.chunks(q, kv, plan.chunks, spec), metadata.query_start)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if plan.decodes is not None:
            out[:count] = self.package.decode(q[:count], kv, plan.decodes, spec)
        if plan.chunks is not None:
            chunks = self.package.chunks(q[count:], kv, plan.chunks, spec)
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
