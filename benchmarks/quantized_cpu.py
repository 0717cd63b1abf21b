"""The four products of a layer on a CPU, with quantized weights and in bf16, in milliseconds.

Thirty layers of the demo model's shape follow one another, so that weights come from memory as in a
step. The forms are timed in turn and the least of several times counts, because other programs of
the machine slow all of them down. `--threads 1` counts the processor's time, which they disturb
least.
"""

import argparse
import time
from collections.abc import Callable

import nv_kernels as nk
import torch
from nv_kernels.linear.quantized.block_kinds import BLOCK_KINDS
from report import report

HIDDEN, WIDTH, LAYERS = 576, 1536, 30
SHAPES = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
TOKENS = (1, 2, 4, 8, 16, 32, 128)
Layer = list[nk.Weight]


class Ones:
    """The weight of a norm."""

    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
    eps = 1e-6


def codes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(256, (rows, columns), dtype=torch.uint8)


def blocks(kind: str, rows: int, columns: int) -> nk.Blocks:
    """Random blocks whose fp16 numbers are 0.01."""
    layout = BLOCK_KINDS[kind]
    values = codes(rows * columns // layout.num_values, layout.num_bytes)
    small = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    values[:, :2] = values[:, 2:4] = small
    return nk.Blocks((values.view(rows, -1),), kind)


def grouped(bits: int, rows: int, columns: int) -> nk.Grouped:
    scale = torch.full((rows, columns // 64), 0.01, dtype=torch.bfloat16)
    return nk.Grouped(codes(rows, columns * bits // 8), scale, None, bits)


FORMS: dict[str, Callable[[int, int], nk.Quantized]] = {
    "Q4_0": lambda n, k: blocks("Q4_0", n, k),
    "Q4_1": lambda n, k: blocks("Q4_1", n, k),
    "Q5_1": lambda n, k: blocks("Q5_1", n, k),
    "Q8_0": lambda n, k: blocks("Q8_0", n, k),
    "4 bits, groups of 64": lambda n, k: grouped(4, n, k),
    "8 bits, groups of 64": lambda n, k: grouped(8, n, k),
    "fp8, tokens too": lambda n, k: nk.quantize_fp8(torch.randn(n, k)),
    "int8, tokens too": lambda n, k: nk.Int8(codes(n, k).view(torch.int8), torch.full((n,), 0.01)),
}


def model(make: Callable[[int, int], nk.Weight]) -> list[Layer]:
    return [[make(*shape) for shape in SHAPES] for _ in range(LAYERS)]


def run(layers: list[Layer], x: torch.Tensor) -> None:
    stream = nk.Stream(x)
    for qkv, output, gate_up, down in layers:
        _, stream = qkv.norm_linear(stream, Ones)
        stream = output.linear_add(x, stream)
        gated, stream = gate_up.norm_gated_linear(stream, Ones)
        stream = down.linear_add(gated, stream)


def measure(models: dict[str, list[Layer]], clock: Callable[[], float], repeats: int) -> dict:
    """By tokens and form, the milliseconds of all layers and the speed over bf16's."""
    figures = {}
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN).bfloat16()
        least = dict.fromkeys(models, float("inf"))
        for repeat in range(repeats + 1):
            for name, layers in models.items():
                start = clock()
                run(layers, x)
                if repeat:
                    least[name] = min(least[name], clock() - start)
        figures[str(tokens)] = {
            name: {"ms": round(t * 1e3, 2), "of_bf16": round(least["bf16"] / t, 2)}
            for name, t in least.items()
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--save")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    arithmetic = nk.arithmetic("fast")
    with torch.inference_mode():
        models = {"bf16": model(lambda n, k: arithmetic.weight(torch.randn(n, k).bfloat16()))}
        for name in args.forms:
            make = FORMS[name]
            models[name] = model(lambda n, k, make=make: arithmetic.quantized(make(n, k)))
        figures = measure(models, clock, args.repeats)
    report("quantized_cpu", {"threads": args.threads, "layers_ms": figures}, args.save)


if __name__ == "__main__":
    main()
