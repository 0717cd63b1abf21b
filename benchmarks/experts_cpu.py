"""A CPU's mixture of experts against a dense MLP of the same active width, in milliseconds.

The layers are 8 experts of which a token uses 2, and a gated MLP of twice an expert's width: each
computes as much per token. With several tokens, the mixture reads up to four times the weights.
The router and its choice count, the norm does not. The two are timed in turn, so that other
programs of the machine slow both down.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import nv_kernels as nk
import torch
from report import report

NUM_EXPERTS, TOP_K = 8, 2
SIZES = {"hidden 1024, expert 1536": (1024, 1536), "hidden 2048, expert 768": (2048, 768)}
TOKENS = (1, 2, 4, 16, 64, 256, 1024)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def in_turn(works: list[Callable[[], object]], repeats: int) -> list[float]:
    """The lower quartile of each work's times, in milliseconds."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, own in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            own.append(time.perf_counter() - start)
    return [sorted(own)[repeats // 4] * 1e3 for own in times]


def layers(
    size: int, width: int, dtype: torch.dtype
) -> tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]:
    """A dense MLP and a mixture of experts, as functions of the normed stream."""
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

    return dense, mixed


def measure(dtype: torch.dtype, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """By sizes and tokens: dense, experts, and their ratio."""
    figures = {}
    for name, (size, width) in SIZES.items():
        pair = layers(size, width, dtype)
        figures[name] = {}
        for tokens in TOKENS:
            x = torch.randn(tokens, size).to(dtype)
            works = [partial(layer, x) for layer in pair]
            in_turn(works, 3)
            first, second = in_turn(works, repeats)
            figures[name][str(tokens)] = {
                "dense": round(first, 3),
                "experts": round(second, 3),
                "ratio": round(second / first, 2),
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = measure(DTYPES[options.dtype], options.repeats)
    setting = {"dtype": options.dtype, "threads": options.threads, "figures": figures}
    report("experts_cpu", setting, options.save)


if __name__ == "__main__":
    main()
