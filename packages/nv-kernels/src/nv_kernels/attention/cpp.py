"""The `cpu` backend: attention in C++, on the compiled kernels of `nv_kernels.cpp`.

Owns the call. Each query row is computed alone and in order of position, so that a token's
attention is bitwise the same in every step: on a CPU it serves as `batch_invariant` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from nv_kernels.cache.layout import KVLayout
from nv_kernels.cpp.calls import kernel
from nv_kernels.cpp.library import why_not

if TYPE_CHECKING:
    from collections.abc import Collection

    from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape, AttentionSpec
    from nv_kernels.cache.layout import KVCache

LANES = 16  # head_dim must be a multiple of this


@dataclass(frozen=True)
class Tables:
    """A step's metadata as the kernel reads it: contiguous int32.

    Attributes:
        query_start: [S + 1].
        context_lens: [S].
        block_tables: [S, W].
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True)
class CPUAttention:
    """The `cpu` backend for one shape; stateless.

    Attributes:
        shape: the shape of attention that it was built for.
        reason: why it was picked.
        name: "cpu", or "batch_invariant" if the caller asked for that name.

    Raises:
        ValueError: a shape or a machine that has no kernel.
    """

    is_capturable: ClassVar[bool] = False
    compiles: ClassVar[bool] = False

    shape: AttentionShape
    reason: str
    name: str = "cpu"

    def __post_init__(self) -> None:
        """Raise ValueError for a shape or a machine without a kernel."""
        shape = self.shape
        if kernel("attention", shape.dtype, shape.dtype) is None:
            why = why_not() or f"dtype is {shape.dtype}: it must be torch.float32 or torch.bfloat16"
            raise ValueError(f"attention backend 'cpu': {why}; or use 'torch'")
        if shape.head_dim % LANES:
            raise ValueError(
                f"head_dim is {shape.head_dim}: attention backend 'cpu' needs a multiple of "
                f"{LANES}; use 'torch'"
            )

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Store a head's tokens of a block side by side, in the order in which they are read."""
        shape = self.shape
        return KVLayout(
            num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype, "HND"
        )

    def refusal(self, spec: AttentionSpec) -> None:
        """It computes every feature."""

    def plan(
        self, metadata: AttentionMetadata, windows: Collection[int | None] = (None,)
    ) -> dict[int | None, Tables]:
        """Convert the tables to contiguous int32, once for all layers, whatever the window."""
        tables = Tables(
            metadata.query_start.int().contiguous(),
            metadata.context_lens.int().contiguous(),
            metadata.block_tables.int().contiguous(),
        )
        return dict.fromkeys(windows, tables)

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: Tables,
        spec: AttentionSpec,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each query to the keys of its own sequence, up to its own position.

        Args:
            q: [T, Hq, D].
            kv: a cache of q's dtype or fp8, of any layout.
            metadata: the step's.
            plan: what `plan` returned for it.
            spec: how the layer attends.
            sinks: [Hq], if the spec has sinks.

        Returns:
            [T, Hq, D] in q's dtype; rows without keys are 0.

        Raises:
            ValueError: queries, cache or sinks are not of the shape that it was built for.
        """
        call = kernel("attention", q.dtype, kv.k.dtype)
        assert call is not None, f"no kernel for {q.dtype} over {kv.k.dtype}"
        assert spec.sinks == (sinks is not None)
        self._check(q, kv, sinks)
        logits = None if sinks is None else sinks.float().contiguous()  # [Hq]
        q = q.contiguous()
        out = torch.empty_like(q)
        call(
            *(q.data_ptr(), *kv.arguments, plan.query_start.data_ptr()),
            *(plan.context_lens.data_ptr(), plan.block_tables.data_ptr()),
            *(*plan.block_tables.shape, q.shape[1], kv.k.shape[2], q.shape[2]),
            *(spec.scale * kv.k_scale, kv.v_scale, spec.window or 0, spec.softcap or 0.0),
            *(None if logits is None else logits.data_ptr(), out.data_ptr(), q.shape[0]),
            torch.get_num_threads(),
        )
        return out

    def _check(self, q: torch.Tensor, kv: KVCache, sinks: torch.Tensor | None) -> None:
        """Raise ValueError for shapes of which the kernel would read other memory."""
        dim, kv_heads = self.shape.head_dim, self.shape.num_kv_heads
        heads = self.shape.num_q_heads
        is_cache = kv.k.shape[2:] == (kv_heads, dim) and kv.v.shape == kv.k.shape
        is_query = q.dim() == 3 and q.shape[1:] == (heads, dim)
        if not is_cache or not is_query or (sinks is not None and sinks.shape != (heads,)):
            raise ValueError(
                f"attention backend '{self.name}': q is {list(q.shape)} and the cache's k is "
                f"{list(kv.k.shape)}: they must be [T, {heads}, {dim}] and [blocks, block_size, "
                f"{kv_heads}, {dim}], with sinks [{heads}] if there are any"
            )
