"""Steps of attention to time: lengths, shuffled blocks of one pool, rotating block tables.

Consecutive replays use disjoint block tables, so that a replay does not find its keys in L2.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import nv_kernels as nk
import torch
import triton
import triton.language as tl
from nv_kernels.attention.flash import FlashAttention
from nv_kernels.attention.metadata import AttentionShape
from nv_kernels.attention.triton.backend import TritonAttention
from step_parts import graph_time
from torch.nn import functional

POOL_TOKENS = 655_360  # 2.7 GB of bf16 keys and values at 8 heads of 128
MAX_CONTEXT = 4096  # the bound that a graph is captured for, unless a length exceeds it


@dataclass(frozen=True)
class Case:
    """One step to time.

    Attributes:
        name: row of the table.
        rows: (query_len, context_len) of each sequence, decode rows first.
        heads: query heads, kv heads.
        fp8: cache in e4m3.
        block_size: tokens per block.
        head_dim: of queries, keys and values.
        window, softcap, sinks: the layer's, as in `nk.AttentionSpec`.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (16, 8)
    fp8: bool = False
    block_size: int = 256
    head_dim: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def spec(self) -> nk.AttentionSpec:
        return nk.AttentionSpec(self.head_dim**-0.5, self.window, self.softcap, self.sinks)

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values, each read once."""
        width = self.heads[1] * self.head_dim * (1 if self.fp8 else 2)
        if self.window is None:
            return 2 * width * sum(context for _, context in self.rows)
        reach = self.window - 1
        return 2 * width * sum(min(context, query + reach) for query, context in self.rows)

    @property
    def flops(self) -> int:
        """FLOPs of both products, over the keys that the causal mask and the window permit."""
        pairs = 0
        for query, context in self.rows:
            pairs += sum_to(context) - sum_to(context - query)
            if self.window is not None:
                outside = max(context - self.window, 0), max(context - query - self.window, 0)
                pairs -= sum_to(outside[0]) - sum_to(outside[1])
        return 4 * pairs * self.head_dim * self.heads[0]


def sum_to(count: int) -> int:
    """1 + 2 + … + count."""
    return count * (count + 1) // 2


def decode(name, lengths, **options) -> Case:
    return Case(name, tuple((1, length) for length in lengths), **options)


def decode_cases() -> list[Case]:
    rng = random.Random(7)
    ragged = [rng.randint(100, 2048) for _ in range(256)]
    shapes = {
        "1 x 1024": [1024],
        "8 x 1024": [1024] * 8,
        "64 x 820": [820] * 64,
        "256 x 820": [820] * 256,
        "32 x 8192": [8192] * 32,
        "256 x 100..2048": ragged,
    }
    cases = [decode(name, lengths) for name, lengths in shapes.items()]
    cases += [decode(f"{name}, fp8", lengths, fp8=True) for name, lengths in shapes.items()]
    for heads in ((32, 8), (64, 8)):
        group = heads[0] // heads[1]
        for name in ("8 x 1024", "256 x 820"):
            cases.append(decode(f"{name}, group {group}", shapes[name], heads=heads))
    for block_size in (16, 64):
        for name in ("8 x 1024", "256 x 820"):
            cases.append(decode(f"{name}, page {block_size}", shapes[name], block_size=block_size))
    return cases


def prefill_cases() -> list[Case]:
    return [
        Case("prefill 16 x 1024", ((1024, 1024),) * 16),
        Case("prefill 2 x 8192", ((8192, 8192),) * 2),
        Case("prefill 1 x 1024", ((1024, 1024),)),
        Case("prefill 4 x 1024 after 7168", ((1024, 8192),) * 4),
        Case("prefill 64 x 16 after 1024", ((16, 1040),) * 64),
        Case("prefill 16 x 1024, group 4", ((1024, 1024),) * 16, heads=(32, 8)),
        Case("prefill 16 x 1024, page 16", ((1024, 1024),) * 16, block_size=16),
        Case("prefill 16 x 1024, fp8", ((1024, 1024),) * 16, fp8=True),
    ]


class Work:
    """A case's tensors on the card: one cache, several steps over disjoint blocks of it."""

    def __init__(self, case: Case, sets: int, pool_tokens: int = POOL_TOKENS):
        self.case = case
        backend = self.backend()
        dtype = torch.float8_e4m3fn if case.fp8 else torch.bfloat16
        self.kv = backend.kv_layout(pool_tokens // case.block_size, dtype).allocate("cuda")
        for part in (self.kv.k, self.kv.v):
            for block in part.split(512):
                block.copy_(torch.randn(block.shape, device="cuda", dtype=torch.bfloat16))
        num_tokens = sum(q for q, _ in case.rows)
        shape = (num_tokens, case.heads[0], case.head_dim)
        self.q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.backends = [self.backend() for _ in range(sets)]
        self.steps = [self._metadata(tables) for tables in self._tables(sets)]
        pairs = zip(self.backends, self.steps, strict=True)
        self.plans = [backend.plan(step, [case.window])[case.window] for backend, step in pairs]
        heads = torch.randn(case.heads[0], device="cuda", dtype=torch.bfloat16)
        self.sinks = heads if case.sinks else None

    @property
    def shape(self) -> AttentionShape:
        case = self.case
        device = torch.device("cuda")
        return AttentionShape(device, torch.bfloat16, *case.heads, case.head_dim, case.block_size)

    def backend(self) -> TritonAttention:
        return TritonAttention(self.shape, "a benchmark")

    def flash(self) -> Callable[[int], torch.Tensor] | None:
        """The same step with the installed FlashAttention package, over the same cache."""
        if self.case.fp8:
            return None
        try:
            backend = FlashAttention(self.shape, "a benchmark")
        except ValueError:  # not installed, or it does not support these blocks
            return None
        if backend.refusal(self.spec):
            return None
        window = self.case.window
        plans = [backend.plan(step, [window])[window] for step in self.steps]

        def attend(index: int) -> torch.Tensor:
            index %= len(plans)
            return backend.attend(self.q, self.kv, self.steps[index], plans[index], self.spec)

        return attend

    def dense(self) -> Callable[[int], torch.Tensor] | None:
        """torch's attention, if rows are equal: it needs contiguous keys instead of blocks."""
        query, context = self.case.rows[0]
        if self.spec.features:
            return None
        if self.case.fp8 or set(self.case.rows) != {(query, context)} or query not in (1, context):
            return None
        num_rows = len(self.case.rows)
        keys, values = (part.flatten(0, 1) for part in (self.kv.k, self.kv.v))  # [slots, Hkv, D]
        q = self.q.view(num_rows, query, *self.q.shape[1:]).transpose(1, 2)
        size = num_rows * context

        def attend(index: int) -> torch.Tensor:
            start = index * size % (keys.shape[0] - size + 1)
            k, v = (
                part[start : start + size].unflatten(0, (num_rows, context)).transpose(1, 2)
                for part in (keys, values)
            )  # [N, Hkv, context, D]
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=query > 1, scale=self.spec.scale, enable_gqa=True
            )

        return attend

    @property
    def spec(self) -> nk.AttentionSpec:
        return self.case.spec

    def attend(self, index: int) -> torch.Tensor:
        index %= len(self.steps)
        backend, step, plan = self.backends[index], self.steps[index], self.plans[index]
        return backend.attend(self.q, self.kv, step, plan, self.spec, sinks=self.sinks)

    def plan(self, index: int) -> None:
        index %= len(self.steps)
        self.backends[index].plan(self.steps[index], [self.case.window])

    def error(self, attend: Callable[[int], torch.Tensor]) -> float:
        """Relative error of up to five sequences, 256 query rows each, against the definition."""
        out, step = attend(0), self.steps[0]
        starts = step.query_start.tolist()
        worst = 0.0
        for row in range(0, len(self.case.rows), max(1, len(self.case.rows) // 4)):
            # The last query rows alone are a step of their own: they see all keys before them.
            count = min(self.case.rows[row][0], 256)
            mine = slice(starts[row + 1] - count, starts[row + 1])
            lone = nk.AttentionMetadata(
                torch.tensor([0, count], dtype=torch.int32),
                step.context_lens[row : row + 1],
                step.block_tables[row : row + 1],
                count,
                self.case.rows[row][1],
                0,
            )
            expected = nk.reference.attention(self.q[mine], self.kv, lone, self.spec, self.sinks)
            off = (out[mine].double() - expected.double()).norm() / expected.double().norm()
            worst = max(worst, float(off)) if off == off else float("inf")
        return worst

    def _tables(self, sets: int) -> list[torch.Tensor]:
        num_blocks, size = self.kv.k.shape[:2]
        blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        widths = [-(-context // size) for _, context in self.case.rows]
        at, found = 0, []
        for _ in range(sets):
            tables = torch.zeros(len(widths), -(-max(widths) // 16) * 16, dtype=torch.int32)
            for row, width in enumerate(widths):
                if at + width > num_blocks:
                    at = 0
                tables[row, :width] = torch.tensor(blocks[at : at + width])
                at += width
            found.append(tables.to("cuda"))
        return found

    def _metadata(self, tables: torch.Tensor) -> nk.AttentionMetadata:
        queries, contexts = zip(*self.case.rows, strict=True)
        starts = torch.tensor([0, *queries]).cumsum(0).to("cuda", torch.int32)
        lengths = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        bounds = max(queries), max(MAX_CONTEXT, *contexts)
        num_decodes = sum(query == 1 for query in queries)
        return nk.AttentionMetadata(starts, lengths, tables, *bounds, num_decodes)


def graph_microseconds(launch, launches: int, replays: int = 15, warm: int = 2) -> float:
    """Median time of one launch: `launches` of them in a graph, replayed after `warm` replays."""

    def work() -> None:
        for index in range(launches):
            launch(index)

    return graph_time(work, replays, warm) / launches


@triton.jit
def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    total = tl.zeros([BLOCK], tl.int32)
    for index in tl.static_range(ROUNDS):
        total += tl.load(x_ptr + base + index * BLOCK + tl.arange(0, BLOCK))
    if tl.sum(total, 0) == 123456789:
        tl.store(out_ptr, 1)


READS = ((4096, 4, 8), (2048, 8, 4), (2048, 4, 4), (2048, 2, 4), (1024, 1, 4))


def read_microseconds(memory: torch.Tensor, num_bytes: int, launches: int) -> float:
    """The shortest time in which a plain kernel reads so many bytes, of several shapes."""
    words = memory.view(-1).view(torch.int32)
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    best = float("inf")
    for block, rounds, warps in READS:
        programs = num_bytes // (4 * block * rounds)
        size = programs * block * rounds
        if size * 4 < 0.98 * num_bytes:
            continue
        room = (words.numel() - size) // 4096 * 4096

        def launch(index, at=(block, rounds, warps, programs, size, room)):
            block, rounds, warps, programs, size, room = at
            start = index * size // 4096 * 4096 % max(room, 4096)
            read_kernel[(programs,)](
                words[start:], out, BLOCK=block, ROUNDS=rounds, num_warps=warps
            )

        best = min(best, graph_microseconds(launch, launches) * num_bytes / (size * 4))
    return best
