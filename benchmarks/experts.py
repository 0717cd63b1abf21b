"""A mixture of experts on a card: the shape of Qwen3-30B-A3B with dummy weights.

Milliseconds per token of one request, and per step of 64; the rate of 64 prompts of 1,024 tokens as
a share of the matmul rate on active parameters; and the launches of one layer's experts, router
included. Their microseconds are with the norm before them. The bound of a token is the read of the
weights that it is multiplied by; that of a step of 64 rows counts every expert, as nearly all are
chosen by some row. Weights are in bf16, or with --quantization in codes, but for head and routers.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nv_kernels as nk
import torch
from attention_work import graph_microseconds
from engines import ENGINES
from profiling import profiled
from report import matmul_ceiling, read_ceiling, report
from round_to_nearest import fp8_blocks, packed
from workload import VOCAB, Workload, model_folder, uniform_workload

ROWS = (1, 16, 64, 1024)
FEW_ROWS = (1, 64)
LAYERS = 8  # per graph, each with rows of its own, so that a layer does not find its weights in L2
PROMPT_LEN = 128
CODES: dict[str, dict[str, Any]] = {
    "4 bits": packed(4, 128).config | {"ignore": ["lm_head", r"re:.*mlp\.gate$"]},
    "fp8": fp8_blocks().config
    | {"modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(48)]},
}
"""A quantization_config without the routers; fp8 as Qwen3-30B-A3B-FP8 has it."""
BYTES = {None: 2.0, "4 bits": 0.5 + 2 / 128, "fp8": 1 + 4 / 128**2}
"""Per value of a layer's matrices."""


@dataclass(frozen=True)
class Shape:
    """The sizes of config.json that decide the time, under its names; the head is not tied."""

    num_hidden_layers: int = 48
    hidden_size: int = 2048
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    vocab_size: int = VOCAB

    def folder(self, quantization: str | None) -> Path:
        """A folder holding only a config.json, for load_format="dummy"."""
        codes = {"quantization_config": CODES[quantization]} if quantization else {}
        return model_folder(
            "qwen3-0.6b",
            **asdict(self),
            **codes,
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            intermediate_size=6144,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )

    def parameters(self, experts: int) -> int:
        """Weights of all layers, with this number of experts in each; without the head."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        a_layer = (
            heads * self.head_dim + self.num_experts + 3 * experts * self.moe_intermediate_size
        )
        return self.num_hidden_layers * self.hidden_size * a_layer

    @property
    def head(self) -> int:
        return self.vocab_size * self.hidden_size


class Runs(NamedTuple):
    """How often and how long is measured, and whether no prompts are."""

    repeats: int
    output_len: int
    is_short: bool


def median_seconds(
    run: Callable[[Workload], float], batch: int, length: int, out: int, repeats: int
) -> float:
    """The median of runs after two; new prompts each time, so that no prefix is cached."""
    seeds = range(repeats + 2)
    times = [run(uniform_workload(batch, length, out, 100 * out + seed)) for seed in seeds]
    return sorted(times[2:])[repeats // 2]


def step_milliseconds(run: Callable[[Workload], float], batch: int, runs: Runs) -> float:
    """Of a decode step, by the difference of long and short outputs."""
    lengths = runs.output_len, runs.output_len // 4
    long, short = (median_seconds(run, batch, PROMPT_LEN, n, runs.repeats) for n in lengths)
    return (long - short) / (lengths[0] - lengths[1]) * 1e3


def whole_model(
    shape: Shape, quantization: str | None, runs: Runs, ceilings: tuple[float, float], engine: str
) -> dict[str, Any]:
    """Batch 1, batch 64 and prompts, each beside its bound."""
    bandwidth, flops = ceilings
    folder = str(shape.folder(quantization))
    run = ENGINES[engine](folder, max_model_len=4096, max_num_seqs=64)
    active = shape.parameters(shape.num_experts_per_tok)
    reads = {1: active, 64: shape.parameters(shape.num_experts)}
    figures: dict[str, Any] = {}
    for batch, parameters in reads.items():
        figures[f"batch {batch}"] = {
            "milliseconds": round(step_milliseconds(run, batch, runs), 3),
            "bound": round(
                (BYTES[quantization] * parameters + 2 * shape.head) / bandwidth * 1e3, 3
            ),
        }
    if runs.is_short:
        return figures
    seconds = median_seconds(run, 64, 1024, 1, runs.repeats)
    figures["prefill 64 x 1024"] = {
        "tokens_per_second": round(64 * 1024 / seconds),
        "share_of_matmul_rate": round(64 * 1024 * 2 * active / seconds / flops, 3),
    }
    return figures


class Scores(NamedTuple):
    """A router as `nk.Experts` reads it."""

    weight: nk.Weight
    top_k: int
    bias: torch.Tensor | None = None
    is_normalised: bool = True


class RMS(NamedTuple):
    """A norm of the stream."""

    weight: torch.Tensor
    eps: float = 1e-6


def codes(quantization: str, rows: int, columns: int) -> nk.Quantized:
    """A record of random codes."""
    if quantization == "fp8":
        values = torch.randn(rows, columns, device="cuda") * 16
        scale = torch.full((rows // 128, columns // 128), columns**-0.5 / 16, device="cuda")
        return nk.Fp8(values.to(torch.float8_e4m3fn), scale, "block")
    words = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scale = torch.full((rows, columns // 128), columns**-0.5 / 4, device="cuda")
    return nk.Grouped(words, scale.bfloat16(), None, 4)


def launches(
    shape: Shape, quantization: str | None, arithmetic: str, row_counts: tuple[int, ...]
) -> dict[str, Any]:
    """Launches and microseconds of one layer's experts, by rows."""
    kind = nk.arithmetic(arithmetic)
    size, width = shape.hidden_size, shape.moe_intermediate_size

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16, device="cuda") * sizes[-1] ** -0.5

    norm = RMS(torch.ones(size, dtype=torch.bfloat16, device="cuda"))
    router = Scores(kind.weight(draw(shape.num_experts, size)), shape.num_experts_per_tok)
    count = range(shape.num_experts)
    if quantization is None:
        gate_up, down = draw(len(count), 2 * width, size), draw(len(count), size, width)
        experts = kind.experts(nk.DenseExperts(gate_up, down))
    else:
        sizes = (width, size), (width, size), (size, width)
        stacks = [tuple(codes(quantization, *each) for _ in count) for each in sizes]
        experts = kind.quantized_experts(nk.QuantizedExperts(*stacks))
    figures = {}
    for rows in row_counts:
        inputs = torch.randn(LAYERS, rows, size, dtype=torch.bfloat16, device="cuda")

        def layer(index: int, inputs: torch.Tensor = inputs) -> nk.Stream:
            return experts.norm_add(nk.Stream(inputs[index]), norm, router)

        for _ in range(3):
            layer(0)
        kernels = profiled(partial(layer, 0))["kernels"]
        kernels = [kernel for kernel in kernels if kernel["name"] != "rms_norm_kernel"]
        figures[str(rows)] = {
            "launches": sum(kernel["count"] for kernel in kernels),
            "kernels": [kernel["name"] for kernel in kernels],
            "microseconds": round(graph_microseconds(layer, LAYERS), 2),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="nv")
    parser.add_argument("--quantization", choices=CODES)
    parser.add_argument("--short", action="store_true", help="a part of it, in about a minute")
    parser.add_argument("--save")
    args = parser.parse_args()
    shape, codes_of = Shape(), args.quantization
    ceilings = read_ceiling(), matmul_ceiling()  # while the card is empty
    rows, kinds = ROWS, ("fast", "batch_invariant")
    runs = Runs(repeats=5, output_len=256, is_short=False)
    if args.short:
        rows, kinds, runs = FEW_ROWS, ("fast",), Runs(repeats=3, output_len=96, is_short=True)
    figures = {
        "engine": args.engine,
        "quantization": codes_of,
        "output_len": runs.output_len,
        "shape": asdict(shape),
        "launches": {name: launches(shape, codes_of, name, rows) for name in kinds},
    }
    torch.cuda.empty_cache()
    figures |= whole_model(shape, codes_of, runs, ceilings, args.engine)
    report("experts", figures, args.save)


if __name__ == "__main__":
    main()
