"""Gain of three special kernels on a card, beside the general kernels that would do their work.

Weights in shared memory first: 28 layers of Qwen3-0.6B with Slab, with Dot of the same tiles, and
with the library. Groups of warps that share the tokens: layers of Qwen3-8B with Many, with the
forms before it, and with the library; and the four products alone. Zeros for padding: the rows past
a step's last, zeroed by `zero_tail` and by `masked_fill_`. All in turn in CUDA graphs.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from nv_kernels.attention.triton.zero_tail import zero_tail
from nv_kernels.launch import compile_ahead
from nv_kernels.linear.triton import product
from nv_kernels.linear.tuned import Dot, Form, Library, Slab, choose
from report import matmul_ceiling, report
from step_parts import BF16, DEVICE, Model, error, graph_time, read_ceiling, time_each

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = (3, 8, 16, 32, 64)
PADDED = ((64, 40), (512, 300), (2048, 1500), (8192, 6200))
"""Rows of a step, and those of its sequences."""
ROUNDS = 5
CALLS = 20  # per graph
HIDDEN = 1024
LARGE_ROWS = (32, 64, 128, 192, 256)
LARGE_LAYERS = 6
LARGE = {"qkv": (6144, 4096, False), "output": (4096, 4096, False),
         "gate_up": (24576, 4096, True), "down": (4096, 12288, False)}  # fmt: skip
# Forms of Qwen3-8B before Many, by most tokens; the library elsewhere.
EARLIER: dict[tuple[int, tuple[int, int, bool]], Form] = {
    (64, LARGE["output"]): Dot(64, 64, 64, 4, 6, True, 4, trigger=1, prefetch=True),
    (64, LARGE["gate_up"]): Dot(64, 64, 64, 1, 4, False, 4),
    (64, LARGE["down"]): Dot(64, 128, 64, 4, 5, True, 8),
    (128, LARGE["gate_up"]): Dot(128, 128, 64, 1, 3, False, 4),
}


def as_dot(slab: Form) -> Form:
    """The same tiles in Triton's pipelined loop."""
    if not isinstance(slab, Slab):
        return slab
    return Dot(slab.block_m, 64, 128, slab.split_k, 4, True, 4, trigger=1, prefetch=True)


def chosen(
    way: Callable[[Form], Form], changed: dict[str, int], name: str, *shape: int, **options: bool
) -> Form:
    """The form that is in use, turned into that of a way; counts the forms that differ."""
    used = choose(*shape, **options)
    changed[name] += way(used) != used
    return way(used)


def chain(tokens: int, model: Model) -> dict[str, float]:
    """Milliseconds of 28 layers by form, the median of rounds in turn; and the largest error."""
    inputs = model.inputs(tokens)
    truth = model.plain(*inputs, dtype=torch.float32)
    ways: dict[str, Callable[[Form], Form]] = {
        "slab": lambda form: form,
        "dot": as_dot,
        "library": lambda form: Library() if isinstance(form, Slab) else form,
    }
    changed = dict.fromkeys(ways, 0)  # products that take another form
    found: dict[str, list[float]] = {name: [] for name in ways}
    errors = []
    for _ in range(ROUNDS):
        for name, way in ways.items():
            product.choose = partial(chosen, way, changed, name)
            errors.append(error(model.run(*model.inputs(tokens)), truth))
            found[name].append(graph_time(lambda: model.run(*inputs)) / 1e3)
    product.choose = choose
    assert changed["slab"] == 0 < min(changed["dot"], changed["library"]), changed
    return {name: round(median(at), 4) for name, at in found.items()} | {"error": max(errors)}


def earlier(tokens: int, rows: int, columns: int, gated: bool = False) -> Form:
    """The form of a product of Qwen3-8B before Many."""
    shape = (rows, columns, gated)
    most = [most for most, of in EARLIER if of == shape and most >= tokens]
    return EARLIER[min(most), shape] if most else Library()


def large(tokens: int, model: Model, read: float, matmul: float) -> dict[str, Any]:
    """Microseconds of a layer of Qwen3-8B by form, and of its products alone.

    A layer is without attention (a copy stands in for it). The bound is of the products: bytes over
    the read rate, or operations over the rate of a matrix product of 8192, per product.
    """
    inputs = model.inputs(tokens)
    truth = model.plain(*inputs, dtype=torch.float32)  # before a run overwrites the inputs
    ways = {"many": choose, "earlier": earlier, "library": lambda *_, **__: Library()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    alone = {name: dict.fromkeys(LARGE, 0.0) for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            product.choose = way
            found[name].append(graph_time(lambda: model.run(*inputs)) / LARGE_LAYERS)
    bound = 0.0
    for key, (rows, columns, gated) in LARGE.items():
        x = torch.randn(tokens, columns, device=DEVICE).to(BF16)
        weights = [getattr(layer, key) for layer in model.layers]
        work = product.gated_linear if gated else product.linear_partials
        for name, way in ways.items():
            product.choose = way
            alone[name][key] = round(time_each(lambda w, x=x, f=work: f(x, w), weights), 1)
        bound += max(rows * columns * 2 / read, 2 * tokens * rows * columns / matmul) * 1e6
    product.choose = choose
    return {
        "layer": {name: round(median(at), 1) for name, at in found.items()},
        "products": alone,
        "sums": {name: round(sum(at.values()), 1) for name, at in alone.items()},
        "bound": round(bound, 1),
        "error": error(model.run(*model.inputs(tokens)), truth),
    }


def padding(rows: int, end: int) -> dict[str, float]:
    """Microseconds to zero the rows from `end` on of 16 heads of 128; the host knows no `end`."""
    out = torch.randn(rows, 16, 128, device=DEVICE, dtype=BF16)
    first = torch.tensor([end], dtype=torch.int32, device=DEVICE)[-1]

    def masked() -> None:
        ids = torch.arange(rows, device=DEVICE)
        out.masked_fill_((ids >= first)[:, None, None], 0.0)

    kernels = {"zero_tail": lambda: zero_tail(out, first), "masked_fill_": masked}
    found: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(ROUNDS):
        for name, kernel in kernels.items():
            found[name].append(graph_time(lambda k=kernel: [k() for _ in range(CALLS)]) / CALLS)
    return {name: round(median(at), 2) for name, at in found.items()}


def chains() -> dict[str, Any]:
    model = Model(HIDDEN, 16, 8, 3072, 28)
    return {f"28 layers, {tokens} rows, ms": chain(tokens, model) for tokens in ROWS}


def large_layers() -> dict[str, Any]:
    read, matmul = read_ceiling(), matmul_ceiling()
    model = Model(4096, 32, 8, 12288, LARGE_LAYERS)
    with compile_ahead():
        for way in (choose, earlier):
            product.choose = way
            for tokens in LARGE_ROWS:
                model.run(*model.inputs(tokens))
    product.choose = choose
    return {"read": read, "matmul": matmul} | {
        f"8B layer, {tokens} rows, us": large(tokens, model, read, matmul) for tokens in LARGE_ROWS
    }


def paddings() -> dict[str, Any]:
    return {f"{rows} rows, {rows - end} of padding, us": padding(rows, end) for rows, end in PADDED}


PARTS = {"slab": chains, "many": large_layers, "padding": paddings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--save")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for part in args.parts or PARTS:
        for name, values in PARTS[part]().items():
            figures[name] = values
            print(name, values, flush=True)
    report("special_kernels", figures, args.save)


if __name__ == "__main__":
    main()
