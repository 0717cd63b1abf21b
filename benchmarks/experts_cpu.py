"""A CPU's mixture of experts against a dense MLP of the same active width, in milliseconds.

The layers are 8 experts of which a token uses 2, and a gated MLP of twice an expert's width: each
computes as much per token. With several tokens, the mixture reads up to four times the weights:
`weights_read` is how many experts the tokens use, as a multiple of two. The router and its choice
count, the norm does not. Layers that together do not fit in the cache follow one another, so that
weights come from memory as in a step. The two kinds are timed in turn, so that other programs of
the machine slow both down. `--threads 1` counts the processor's time, which they disturb least.
A file that is saved again keeps its `tried`, which no run of this script makes.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nv_kernels as nk
import torch
from report import report

NUM_EXPERTS, TOP_K = 8, 2
SIZES = {"hidden 1024, expert 1536": (1024, 1536), "hidden 2048, expert 768": (2048, 768)}
LAYERS = 3
TOKENS = (1, 2, 4, 8, 16, 64, 256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


Layer = Callable[[torch.Tensor], object]


def in_turn(
    works: list[Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> list[float]:
    """The least of each work's times, in milliseconds per layer: other programs only add to it."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, own in zip(works, times, strict=True):
            start = clock()
            work()
            own.append((clock() - start) / LAYERS)
    return [min(own) * 1e3 for own in times]


def layers(
    size: int, width: int, dtype: torch.dtype
) -> tuple[Layer, Layer, Callable[[torch.Tensor], int]]:
    """A dense MLP and a mixture of experts of the normed stream, and how many experts it uses."""
    arithmetic = nk.arithmetic("fast")

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)

    gate_up = arithmetic.weight(draw(2 * TOP_K * width, size))
    down = arithmetic.weight(draw(size, TOP_K * width))
    router = arithmetic.weight(draw(NUM_EXPERTS, size))
    experts = arithmetic.experts(
        nk.DenseExperts(draw(NUM_EXPERTS, 2 * width, size), draw(NUM_EXPERTS, size, width))
    )

    def dense(x: torch.Tensor) -> torch.Tensor:
        return down.linear(gate_up.gated_linear(x))

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return experts.mix(x, experts.route(router.linear(x), TOP_K, True))

    def used(x: torch.Tensor) -> int:
        return len(experts.route(router.linear(x), TOP_K, True).experts.unique())

    return dense, mixed, used


def each(kind: tuple[Layer, ...], x: torch.Tensor) -> None:
    """Layers of a kind, of the same tokens."""
    for layer in kind:
        layer(x)


def measure(
    dtype: torch.dtype, repeats: int, clock: Callable[[], float]
) -> dict[str, dict[str, dict[str, float]]]:
    """By sizes and tokens: dense, experts, their ratio, and that of the weights they read."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, (size, width) in SIZES.items():
        dense, mixed, used = zip(*(layers(size, width, dtype) for _ in range(LAYERS)), strict=True)
        figures[name] = {}
        for tokens in TOKENS:
            x = torch.randn(tokens, size).to(dtype)
            works: list[Callable[[], object]] = [partial(each, kind, x) for kind in (dense, mixed)]
            in_turn(works, 3, clock)
            first, second = in_turn(works, repeats, clock)
            read = sum(count(x) for count in used) / LAYERS / TOP_K
            figures[name][str(tokens)] = {
                "dense": round(first, 3),
                "experts": round(second, 3),
                "ratio": round(second / first, 2),
                "weights_read": round(read, 2),
            }
    return figures


def tried(save: str | None) -> dict[str, Any]:
    """A file's measurements of kernels that are not in the tree, which this script does not run."""
    if save is None or not Path(save).exists():
        return {}
    found = json.loads(Path(save).read_text(encoding="utf-8"))
    return {"tried": found["tried"]} if "tried" in found else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    figures = measure(DTYPES[options.dtype], options.repeats, clock)
    setting = {"dtype": options.dtype, "threads": options.threads, "figures": figures}
    report("experts_cpu", setting | tried(options.save), options.save)


if __name__ == "__main__":
    main()
