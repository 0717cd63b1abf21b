"""Batch-invariant attention with torch's own operations, in fp32: the CPU's version.

Owns the arithmetic. Every product has one shape, [R, D] by [KEYS, D] and [R, KEYS] by [KEYS, D],
for one of two R that give the same bits on this machine; the maximum is a row's own, and the tiles'
sums are added in order of position, a sink last. A tile before a row's window adds exact zeros.
Never reads lengths: `tiling` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from nv_kernels.attention.tiling import KEYS, TileBatch, cut, run_tokens
from nv_kernels.cache.layout import KVLayout, as_bytes
from nv_kernels.linear.heights import LEAST_OUTPUTS, TALL, agreeing_heights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape, AttentionSpec
    from nv_kernels.cache.layout import KVCache

ROWS = (TALL, 32, 16, 8)


class Scratch:
    """Memory for gathered tiles. It is kept: on a CPU, new pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._bytes: dict[str, torch.Tensor] = {}

    def get(self, purpose: str, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return undefined values [num_rows, width], in the same memory at each call of a purpose.

        Args:
            purpose: the name of the memory.
            num_rows: rows.
            width: elements per row.
            dtype: of the values.
        """
        size = num_rows * width * dtype.itemsize
        if purpose not in self._bytes or self._bytes[purpose].numel() < size:
            self._bytes[purpose] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._bytes[purpose][:size].view(dtype).view(num_rows, width)


@dataclass(frozen=True)
class Tiling:
    """The plan of a step.

    Attributes:
        batches: of the step's query tiles.
        is_whole: True if every query row is in a batch.
        window: keys that a query row reads at most; None: all.
    """

    batches: list[TileBatch]
    is_whole: bool
    window: int | None


@dataclass(frozen=True)
class BatchInvariantTorchAttention:
    """The `batch_invariant` backend, on a CPU.

    Attributes:
        shape: the shape of attention that it was built for.
        reason: why it was picked.
        name: "batch_invariant".
        scratch: memory of a layer's tiles.
    """

    is_capturable: ClassVar[bool] = False
    compiles: ClassVar[bool] = False

    shape: AttentionShape
    reason: str
    name: str = "batch_invariant"
    scratch: Scratch = field(default_factory=Scratch, repr=False)

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Store the tokens of a head side by side: a tile is gathered in runs of many tokens."""
        shape = self.shape
        return KVLayout(
            num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype, "HND"
        )

    def refusal(self, spec: AttentionSpec) -> None:
        """It computes every feature."""

    def plan(
        self, metadata: AttentionMetadata, windows: Collection[int | None] = (None,)
    ) -> dict[int | None, Tiling]:
        """Cut the step into tiles, once for all layers of a window."""
        group = self.shape.num_q_heads // self.shape.num_kv_heads
        heights = _heights(self.shape.head_dim, torch.get_num_threads())
        few_rows = min((height for height in heights if height >= group), default=TALL)
        return {
            window: Tiling(*cut(metadata, self.shape, few_rows, window), window)
            for window in windows
        }

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: Tiling,
        spec: AttentionSpec,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each query to the keys of its own sequence, up to its own position.

        Args:
            q: [T, Hq, D].
            kv: a cache of this backend's layout.
            metadata: the step's.
            plan: what `plan` returned for it.
            spec: how the layer attends.
            sinks: [Hq], if the spec has sinks.

        Returns:
            [T, Hq, D] in q's dtype; rows without keys are 0.
        """
        assert plan.window == spec.window
        assert spec.sinks == (sinks is not None)
        whole = plan.is_whole and int(metadata.query_start[-1]) == q.shape[0]
        out = torch.empty_like(q) if whole else torch.zeros_like(q)
        for batch in plan.batches:
            attended = _attend(q[batch.query_rows], batch, kv, self.scratch, spec, sinks=sinks)
            out[batch.out_rows] = attended.to(q.dtype)
        return out


def _attend(
    q: torch.Tensor,
    batch: TileBatch,
    kv: KVCache,
    scratch: Scratch,
    spec: AttentionSpec,
    *,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend a batch of items: q [I, tokens, Hq, D] -> [N, Hq, D] fp32, the real tokens."""
    items, tokens, num_q_heads, dim = q.shape
    heads = kv.k.shape[2]
    group = num_q_heads // heads
    rows = q.view(items, tokens, heads, group, dim).transpose(1, 2)  # [I, H, tokens, G, D]
    rows = rows.reshape(items, heads, tokens * group, dim).float() * (spec.scale * kv.k_scale)
    rows = functional.pad(rows, (0, 0, 0, batch.num_rows - tokens * group))  # [I, H, R, D]
    k = _gather(kv.k, batch, scratch)  # [F H, KEYS, D]
    tiles, shape = batch.item_of_tile.shape[0], (heads, batch.num_rows)
    scores = torch.bmm(rows[batch.item_of_tile].flatten(0, 1), k.transpose(1, 2))
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores = scores.view(tiles, *shape, KEYS).add_(batch.mask)
    top = _over_tiles(scores.amax(-1), batch.counts, torch.maximum)  # [I, H, R]
    if sinks is not None:
        logits = sinks.float().view(heads, 1, group).expand(-1, tokens, -1).flatten(1)
        logits = functional.pad(logits, (0, batch.num_rows - tokens * group))  # [H, R]
        top = torch.maximum(top, logits)
    weights = scores.sub_(top[batch.item_of_tile][..., None]).exp_()
    v = _gather(kv.v, batch, scratch)
    values = torch.bmm(weights.flatten(0, 1), _widened(v)).view(tiles, *shape, -1)[..., :dim]
    total = _over_tiles(weights.sum(-1), batch.counts, torch.add)
    if sinks is not None:
        total = total + (logits - top).exp_()
    summed = _over_tiles(values, batch.counts, torch.add) / total[..., None]
    out = summed[:, :, : tokens * group].reshape(items, heads, tokens, group, dim)
    by_token = out.transpose(1, 2).reshape(items * tokens, num_q_heads, dim)
    return by_token[batch.kept] * kv.v_scale


def _widened(v: torch.Tensor) -> torch.Tensor:
    """Pad values [..., D] with zeros to LEAST_OUTPUTS, from where the order of sums is known."""
    missing = LEAST_OUTPUTS - v.shape[-1]
    return functional.pad(v, (0, missing)) if missing > 0 else v  # functional.pad always copies


def _over_tiles(
    x: torch.Tensor, counts: tuple[int, ...], combine: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Combine the values of an item's tiles in order: [F, …] -> [I, …]."""
    total = x[: counts[0]]
    if len(counts) > 1:
        total = total.clone()
    start = counts[0]
    for count in counts[1:]:
        combine(total[:count], x[start : start + count], out=total[:count])
        start += count
    return total


def _gather(cache: torch.Tensor, batch: TileBatch, scratch: Scratch) -> torch.Tensor:
    """Read tiles of [num_blocks, block_size, Hkv, D] as [F Hkv, KEYS, D] fp32.

    The next call overwrites the result. Values past a sequence's last token may be NaN; they become
    0.
    """
    dim = cache.shape[3]
    by_head = cache.transpose(1, 2)  # [num_blocks, Hkv, block_size, D], contiguous
    by_run = by_head.view(-1, run_tokens(cache.shape[1]) * dim)  # raises for another layout
    by_run = as_bytes(by_run)
    found = scratch.get("gathered", batch.runs.shape[0], by_run.shape[1], by_run.dtype)
    torch.index_select(by_run, 0, batch.runs, out=found)
    if cache.dtype != torch.float32:
        single = scratch.get("fp32", found.shape[0], found.shape[1], torch.float32)
        found = single.copy_(found.view(cache.dtype))
    found.view(-1, dim).index_fill_(0, batch.absent, 0.0)
    return found.view(-1, KEYS, dim)


@cache
def _heights(head_dim: int, num_threads: int) -> tuple[int, ...]:
    """Measure which R give the same bits in both products; the result always contains TALL."""
    del num_threads  # the library's kernel depends on it
    generator = torch.Generator("cpu").manual_seed(2)
    tile = torch.randn(1, KEYS, head_dim, generator=generator, dtype=torch.float32, device="cpu")
    wide = _widened(tile)

    def scores(block: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.bmm(block[None], tile.transpose(1, 2))[0])

    def values(block: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.bmm(block[None], wide)[0])

    first = agreeing_heights(scores, head_dim, KEYS, ROWS)
    second = agreeing_heights(values, KEYS, wide.shape[-1], ROWS)
    common = tuple(height for height in first if height in second)
    return common if TALL in common else (TALL,)
