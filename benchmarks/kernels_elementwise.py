"""The kernels between the products, alone: norm, gate, rope, cache writes, gather.

Inputs rotate over more than L2; the bound is the bytes read and written over the read rate of the
same run; torch's version is the usual few calls. `kernels.py` runs it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import nv_kernels as nk
import torch
from nv_kernels import reference
from step_parts import BF16, DEVICE, EPS, HEAD_DIM, error, time_each
from torch.nn import functional

HIDDEN, FEATURES, VOCABULARY = 1024, 3072, 151_936
Q_HEADS, KV_HEADS, BLOCK = 16, 8, 256
ROTATED_BYTES = 150e6
POOL_TOKENS = 131_072


class Op(NamedTuple):
    """One kernel to time, with torch's version; both take an item that `make` made."""

    what: str
    num_bytes: int
    make: Callable[[], Any]
    ours: Callable[[Any], Any]
    torch: Callable[[Any], Any]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(BF16)


def norm(tokens: int) -> Op:
    weight = random(HIDDEN)

    def plain(item: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        total = item[0] + item[1]
        return functional.rms_norm(total, (HIDDEN,), weight, EPS)

    return Op(
        "add + RMS norm",
        4 * tokens * HIDDEN * 2,
        lambda: (random(tokens, HIDDEN), random(tokens, HIDDEN)),
        lambda item: nk.add_rms_norm(*item, weight, EPS)[0],
        plain,
    )


def gate(tokens: int) -> Op:
    def plain(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return functional.silu(first) * second

    make = lambda: random(tokens, 2 * FEATURES)  # noqa: E731
    return Op("SiLU gate", 3 * tokens * FEATURES * 2, make, nk.silu_and_mul, plain)


def slots(tokens: int) -> torch.Tensor:
    return torch.randperm(POOL_TOKENS, device=DEVICE)[:tokens].contiguous()


def rope(tokens: int, kv: nk.KVCache) -> Op:
    q_weight, k_weight = random(HEAD_DIM), random(HEAD_DIM)
    positions = torch.randint(0, 4000, (tokens,), device=DEVICE)
    cos_sin = torch.randn(4096, HEAD_DIM, device=DEVICE)
    heads = Q_HEADS + 2 * KV_HEADS

    def ours(item: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        qkv, where = item
        return nk.qk_norm_rope_store(
            qkv, q_weight, k_weight, EPS, positions, cos_sin, kv, where, Q_HEADS
        )

    def plain(item: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        qkv, where = item
        q, k, v = qkv.view(tokens, heads, HEAD_DIM).split([Q_HEADS, KV_HEADS, KV_HEADS], 1)
        q = functional.rms_norm(q, (HEAD_DIM,), q_weight, EPS)
        k = functional.rms_norm(k, (HEAD_DIM,), k_weight, EPS)
        put(kv, reference.apply_rope(k, positions, cos_sin), v, where)
        return reference.apply_rope(q, positions, cos_sin)

    size = 2 * tokens * heads * HEAD_DIM * 2
    make = lambda: (random(tokens, heads * HEAD_DIM), slots(tokens))  # noqa: E731
    return Op("q/k norm + rope + store", size, make, ours, plain)


def store(tokens: int, kv: nk.KVCache) -> Op:
    shape = (tokens, KV_HEADS, HEAD_DIM)
    return Op(
        "store keys, values",
        4 * math.prod(shape) * 2,
        lambda: (random(*shape), random(*shape), slots(tokens)),
        lambda item: nk.store_kv(item[0], item[1], kv, item[2]),
        lambda item: put(kv, *item),
    )


def put(kv: nk.KVCache, k: torch.Tensor, v: torch.Tensor, where: torch.Tensor) -> None:
    kv.k.view(-1, *k.shape[1:]).index_copy_(0, where, k)
    kv.v.view(-1, *v.shape[1:]).index_copy_(0, where, v)


def copy(tokens: int, kv: nk.KVCache) -> Op:
    count = tokens // BLOCK
    lengths = torch.full((count,), BLOCK, dtype=torch.int32, device=DEVICE)

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.randperm(POOL_TOKENS // BLOCK, device=DEVICE)
        return blocks[:count].contiguous(), blocks[count : 2 * count].contiguous()

    def plain(item: tuple[torch.Tensor, torch.Tensor]) -> None:
        for part in (kv.k, kv.v):
            part.index_copy_(0, item[1], part.index_select(0, item[0]))

    return Op(
        "copy blocks",
        4 * tokens * KV_HEADS * HEAD_DIM * 2,
        make,
        lambda item: nk.copy_blocks(kv, *item, lengths),
        plain,
    )


def gather(tokens: int, table: torch.Tensor) -> Op:
    return Op(
        "embedding",
        2 * tokens * HIDDEN * 2,
        lambda: torch.randint(0, VOCABULARY, (tokens,), device=DEVICE),
        lambda ids: nk.embedding(ids, table),
        lambda ids: functional.embedding(ids, table),
    )


def elementwise_rows(rate):
    """Each kernel with a decode step's rows and with a prompt's."""
    layout = nk.KVLayout(POOL_TOKENS // BLOCK, BLOCK, KV_HEADS, HEAD_DIM, BF16, "NHD")
    kv, table = layout.allocate(DEVICE), random(VOCABULARY, HIDDEN)
    for tokens in (256, 8192):
        ops = norm(tokens), gate(tokens), rope(tokens, kv), store(tokens, kv), copy(tokens, kv)
        for op in (*ops, gather(tokens, table)):
            items = [op.make() for _ in range(max(2, min(40, int(ROTATED_BYTES / op.num_bytes))))]
            row = {
                "what": op.what, "rows": tokens, "unit": "us", "ours": time_each(op.ours, items),
                "torch": time_each(op.torch, items), "bound": op.num_bytes / rate * 1e6,
                "target": None,
            }  # fmt: skip
            if (out := op.ours(items[0])) is not None:
                row["error"] = error(out, op.torch(items[0]))
            yield row
