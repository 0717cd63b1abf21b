"""Steps of attention to test: ragged lengths, shuffled blocks, a cache of any layout."""

from dataclasses import dataclass, replace

import nv_kernels as nk
import torch
from nv_kernels.attention.metadata import AttentionShape
from nv_kernels.cache.layout import KVLayout

UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}


# Blocks of the tests have 16 or 64 tokens, tiles of the kernels 32, 64 or 128.
FEATURES = {
    "window of 1": {"window": 1},
    "window inside a tile": {"window": 5},
    "window of a tile": {"window": 64},
    "window over tiles": {"window": 75},
    "window past every context": {"window": 1000},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "all": {"window": 19, "softcap": 1.3, "sinks": True},
}


@dataclass(frozen=True)
class Step:
    """One step's tensors; `expected` computes the definition's answer."""

    shape: AttentionShape
    q: torch.Tensor
    kv: nk.KVCache
    metadata: nk.AttentionMetadata
    spec: nk.AttentionSpec
    sinks: torch.Tensor | None = None

    def expected(self) -> torch.Tensor:
        return nk.reference.attention(self.q, self.kv, self.metadata, self.spec, self.sinks)

    def attend(self, backend: nk.AttentionBackend) -> torch.Tensor:
        plan = backend.plan(self.metadata, [self.spec.window])[self.spec.window]
        arguments = self.q, self.kv, self.metadata, plan, self.spec
        return backend.attend(*arguments, sinks=self.sinks)

    def with_features(self, **features) -> "Step":
        """The step of a layer with other features; its sinks differ from head to head."""
        spec = replace(self.spec, **features)
        heads = torch.arange(self.q.shape[1], device=self.q.device)
        sinks = (1.5 - heads % 4).to(self.q.dtype) if spec.sinks else None
        return replace(self, spec=spec, sinks=sinks)

    def forget_unread(self) -> None:
        """Fill with NaN what the window hides from every row; blocks of only that become others."""
        block_size, last = self.kv.k.shape[1], self.kv.k.shape[0] - 1  # the last block is unused
        starts = self.metadata.query_start.tolist()
        for index, context in enumerate(self.metadata.context_lens.tolist()):
            queries = starts[index + 1] - starts[index]
            first = max(0, context - queries - self.spec.window + 1)
            table = self.metadata.block_tables[index]
            position = torch.arange(first, device=table.device)
            block = table[position // block_size].long()
            for cache in (self.kv.k, self.kv.v):
                cache[block, position % block_size] = float("nan")
            table[: first // block_size] = last


def step(
    rows,
    *,
    device,
    heads=(4, 2),
    head_dim=64,
    block_size=64,
    dtype=torch.bfloat16,
    fp8=False,
    order="NHD",
    padding=0,
    bounds=None,
    seed=0,
) -> Step:
    """Build a step.

    Args:
        rows: (query_len, context_len) of each sequence, decode rows first.
        padding: query rows past the last sequence's.
        bounds: max_query_len and max_context_len, where they exceed the exact ones.

    The pool's unused slots hold NaN if the dtype has one: it reveals a kernel that reads them.
    """
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads = heads
    queries = [row[0] for row in rows]
    contexts = [row[1] for row in rows]
    widths = [-(-context // block_size) for context in contexts]
    num_blocks = sum(widths) + 2
    order_of_blocks = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(rows), max([*widths, 1]) + 3), num_blocks - 1, dtype=torch.int32)
    kv_dtype = torch.float8_e4m3fn if fp8 else dtype
    layout = KVLayout(num_blocks, block_size, num_kv_heads, head_dim, kv_dtype, order)
    empty = layout.allocate(device)
    scales = (0.5, 0.25) if fp8 else (1.0, 1.0)
    kv = nk.KVCache(empty.k, empty.v, *scales)
    if not fp8:
        kv.k.fill_(float("nan"))
        kv.v.fill_(float("nan"))
    for index, context in enumerate(contexts):
        mine = [order_of_blocks.pop() for _ in range(widths[index])]
        tables[index, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        position = torch.arange(context)
        slots = torch.tensor(mine)[position // block_size] * block_size if context else position
        keys = torch.randn(context, 2 * num_kv_heads, head_dim, generator=generator) * 0.5
        keys = keys.to(device=device, dtype=dtype)
        k, v = keys.chunk(2, dim=1)
        nk.reference.store_kv(k, v, kv, (slots + position % block_size).to(device))
    num_tokens = sum(queries) + padding
    q = torch.randn(num_tokens, num_q_heads, head_dim, generator=generator).to(device, dtype)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    most = bounds or (max(queries), max(contexts))
    num_decodes = 0
    while num_decodes < len(rows) and queries[num_decodes] == 1:
        num_decodes += 1
    metadata = nk.AttentionMetadata(
        starts.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        tables.to(device),
        *most,
        num_decodes,
    )
    shape = AttentionShape(
        torch.device(device), dtype, num_q_heads, num_kv_heads, head_dim, block_size
    )
    return Step(shape, q, kv, metadata, nk.AttentionSpec(head_dim**-0.5))


def assert_attends(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with the definition (float64 inside, rounded to q's dtype).

    The kernels round the softmax weights to 16 bits before the second product: relative errors of
    at most half a unit in the last place each (2**-9 in bf16, 2**-12 in fp16), independent, so
    the output's norm is off by about half of that (2e-3 in bf16 measured), and the output's own
    rounding adds as much. An element is a mean of values of size about 0.5: the absolute bound is
    four units in the last place at 0.5.
    """
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.isfinite().all()
    unit = UNITS[expected.dtype]
    error = (actual.double() - expected.double()).norm()
    assert error <= 1.5 * unit * expected.double().norm() + 1e-12, (error, expected.norm())
    torch.testing.assert_close(actual, expected, rtol=4 * unit, atol=2 * unit)
