"""Gain of two special kernels on a card: weights in shared memory first, and zeros for padding.

Each beside the general kernels that would do its work, in turn in CUDA graphs: 28 layers of
Qwen3-0.6B with Slab, with Dot of the same tiles, and with the library; the rows past a step's last,
zeroed by `zero_tail` and by `masked_fill_`.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from nv_kernels.attention.triton.zero_tail import zero_tail
from nv_kernels.linear.triton import product
from nv_kernels.linear.tuned import Dot, Form, Library, Slab, choose
from report import report
from step_parts import BF16, DEVICE, Model, error, graph_time

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = (3, 8, 16, 32, 64)
PADDED = ((64, 40), (512, 300), (2048, 1500), (8192, 6200))
"""Rows of a step, and those of its sequences."""
ROUNDS = 5
CALLS = 20  # per graph
HIDDEN = 1024


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    model = Model(HIDDEN, 16, 8, 3072, 28)
    for tokens in ROWS:
        figures[f"28 layers, {tokens} rows, ms"] = chain(tokens, model)
    for rows, end in PADDED:
        figures[f"{rows} rows, {rows - end} of padding, us"] = padding(rows, end)
    for name, values in figures.items():
        print(name, values, flush=True)
    report("special_kernels", figures, args.save)


if __name__ == "__main__":
    main()
