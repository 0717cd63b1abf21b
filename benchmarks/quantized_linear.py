"""A layer of Qwen3-8B with quantized weights, over the same layer in bf16, on one card.

Each form runs the chain of `kernels_step.py` (norms, products, gate, rope and a copy in place of
attention) in a CUDA graph over several layers, so that no weight is in L2. Its figure is its share
of bf16's time in the same run. `--save` writes the figures.
"""

from __future__ import annotations

import argparse

import torch
from nv_kernels import Fp8, Grouped, Int8, quantized_weight
from nv_kernels.launch import compile_ahead
from nv_kernels.linear.quantized.tokens import to_e4m3
from nv_kernels.linear.triton.weight import TritonDense
from report import matmul_ceiling, report
from step_parts import Layer, Model, graph_time, read_ceiling

LAYERS = 6
TOKENS = (1, 16, 64, 256, 4096)
TARGETS = {
    "fp8 rows": (0.60, 0.60, 0.65, 0.70, 0.62),
    "fp8 blocks": (0.62, 0.62, 0.70, 0.80, 0.72),
    "int8": (0.60, 0.60, 0.65, 0.75, 0.65),
    "4 bits": (0.38, 0.40, 0.55, 1.00, 1.10),
}


def fp8_rows(values: torch.Tensor) -> Fp8:
    """Row scales, tokens quantized by row."""
    scale = values.abs().amax(1).float() / 448
    return Fp8(to_e4m3(values / scale[:, None]), scale, "token")


def fp8_blocks(values: torch.Tensor) -> Fp8:
    """Scales of blocks of 128 by 128, tokens quantized by groups of 128 columns."""
    blocks = values.view(values.shape[0] // 128, 128, -1, 128)
    scale = blocks.abs().amax((1, 3)).float() / 448
    codes = to_e4m3(blocks / scale[:, None, :, None]).view(values.shape)
    return Fp8(codes, scale, "block")


def int8(values: torch.Tensor) -> Int8:
    """Row scales, tokens quantized by row."""
    scale = values.abs().amax(1).float() / 127.5
    return Int8((values / scale[:, None]).round().clamp(-128, 127).to(torch.int8), scale)


def four_bits(values: torch.Tensor, *, has_zeros: bool = False) -> Grouped:
    """Groups of 128 columns, rounded to nearest."""
    groups = values.float().view(values.shape[0], -1, 128)
    if has_zeros:
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).bfloat16()
        zeros = (-low / scale.float()).round().clamp(0, 15)
    else:
        scale = (groups.abs().amax(2) / 7.5).bfloat16()
        zeros = torch.full_like(scale, 8.0)
    q = (groups / scale.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    q = q.view(values.shape).to(torch.uint8)
    offset = zeros.to(torch.uint8) if has_zeros else None
    return Grouped(q[:, ::2] | q[:, 1::2] << 4, scale, offset, 4)


KINDS = {"fp8 rows": fp8_rows, "fp8 blocks": fp8_blocks, "int8": int8, "4 bits": four_bits}


class QuantizedModel(Model):
    """The model with each matrix as a weight of a record."""

    def __init__(self, model: Model, make) -> None:
        vars(self).update(vars(model))
        self.layers = [
            Layer(
                *(
                    quantized_weight(make(value)) if isinstance(value, torch.Tensor) else value
                    for value in layer
                )
            )
            for layer in model.layers
        ]

    def time(self, inputs) -> float:
        """Microseconds per layer."""
        return graph_time(lambda: self.run(*inputs, weight=as_it_is)) / len(self.layers)


def as_it_is(weight):
    return weight


def chain_rows(model: Model, kinds, tokens=TOKENS):
    """The time of each kind, with bf16 before and after it."""
    inputs = {count: model.inputs(count) for count in tokens}
    dense = {
        count: graph_time(lambda i=inputs[count]: model.run(*i, weight=TritonDense)) / LAYERS
        for count in tokens
    }
    for kind in kinds:
        quantized = QuantizedModel(model, KINDS[kind])
        with compile_ahead():
            for count in tokens:
                quantized.run(*inputs[count], weight=as_it_is)
        for at, count in enumerate(tokens):
            took = quantized.time(inputs[count])
            yield {"kind": kind, "tokens": count, "us": took, "bf16_us": dense[count],
                   "share": took / dense[count], "target": TARGETS[kind][at]}  # fmt: skip
        del quantized
        torch.cuda.empty_cache()


def show(row: dict) -> None:
    print(f"{row['kind']:12}{row['tokens']:6}{row['bf16_us']:9.1f}{row['us']:9.1f}"
          f"{row['share']:7.2f}{row['target']:7.2f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--save")
    args = parser.parse_args()
    model = Model(4096, 32, 8, 12288, LAYERS)
    rows = []
    print(f"{'':12}{'rows':>6}{'bf16':>9}{'us':>9}{'share':>7}{'target':>7}")
    for row in chain_rows(model, args.kinds or KINDS):
        rows.append(row)
        show(row)
    report(
        "quantized_linear",
        {"read_rate": read_ceiling(), "matmul_ceiling": matmul_ceiling(), "rows": rows},
        args.save,
    )


if __name__ == "__main__":
    main()
