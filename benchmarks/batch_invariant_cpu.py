"""The cost of batch invariance on a CPU: a layer of the demo model, milliseconds with and without.

Products are the layer's four; "library" is torch's own product, with weights in
the default layout. Attention uses a cache with blocks of 256.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import nv_kernels as nk
import torch
from report import report
from torch.nn import functional

PRODUCTS = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEAD = (49152, 576)
STEPS = {
    "1 row at 100": [(1, 100)],
    "1 row at 1000": [(1, 1000)],
    "16 rows at 50 to 200": [(1, 50 + 10 * i) for i in range(16)],
    "a prompt of 100": [(100, 100)],
    "a prompt of 1000": [(1000, 1000)],
}


def milliseconds(work: Callable[[], object], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(sorted(times)[repeats // 4] * 1e3, 3)


def library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of `nk.linear` where it need not be batch-invariant."""
    if weight.is_mkldnn:
        return nk.linear(x, weight)
    if len(x) == 1:
        return torch.mv(weight, x[0])[None]
    return functional.linear(x, weight)


def products(dtype: torch.dtype) -> dict[str, dict[str, list[float]]]:
    """By rows: [library, batch-invariant] of a layer and of the head."""
    figures = {}
    made = [torch.randn(shape).to(dtype) * 0.05 for shape in [*PRODUCTS, HEAD]]
    if dtype == torch.bfloat16:
        made = [nk.pack_weight(weight) for weight in made]
    packed = [nk.pack_weight(weight) for weight in made] if dtype == torch.float32 else made
    pairs = [
        (torch.randn(256, weight.shape[1]).to(dtype), weight, laid_out)
        for weight, laid_out in zip(made, packed, strict=True)
    ]
    for rows in (1, 4, 16, 64, 256):

        def layer(invariant: bool, part: slice, rows: int = rows) -> None:
            for x, plain, laid_out in pairs[part]:
                if invariant:
                    nk.batch_invariant_linear(x[:rows], laid_out)
                else:
                    library(x[:rows], plain)

        figures[str(rows)] = {
            name: [milliseconds(lambda i=i, p=part: layer(i, p)) for i in (False, True)]
            for name, part in (("layer", slice(4)), ("head", slice(4, 5)))
        }
    return figures


def attention(dtype: torch.dtype) -> dict[str, list[float]]:
    """By step: [torch, batch_invariant] of a layer."""
    figures: dict[str, list[float]] = {}
    for name, rows in STEPS.items():
        figures[name] = []
        for backend_name in ("torch", "batch_invariant"):
            backend = nk.attention_backend(
                backend_name, device="cpu", dtype=dtype, num_q_heads=9, num_kv_heads=3,
                head_dim=64, block_size=256,
            )  # fmt: skip
            width = -(-max(context for _, context in rows) // 256)
            tables = torch.randperm(len(rows) * width).view(len(rows), width).int()
            kv = backend.kv_layout(len(rows) * width, dtype).allocate("cpu")
            starts = torch.tensor([0, *(query for query, _ in rows)]).cumsum(0).int()
            contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
            longest = int(contexts.max())
            queries = max(query for query, _ in rows)
            decodes = len(rows) if queries == 1 else 0
            step = nk.AttentionMetadata(starts, contexts, tables, queries, longest, decodes)
            q = torch.randn(int(starts[-1]), 9, 64).to(dtype)
            plan = backend.plan(step)[None]
            arguments: Any = (q, kv, step, plan, nk.AttentionSpec(0.125))
            figures[name].append(milliseconds(lambda b=backend, a=arguments: b.attend(*a)))
    return figures


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save")
    args = parser.parse_args()
    figures: dict[str, Any] = {"threads": torch.get_num_threads()}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        figures[name] = {"products": products(dtype), "attention": attention(dtype)}
    report("batch_invariant_cpu", figures, args.save)


if __name__ == "__main__":
    main()
