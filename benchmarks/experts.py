"""A mixture of experts on a card: the shape of Qwen3-30B-A3B with dummy weights in bf16.

Milliseconds per token of one request, and per step of 64; the rate of 64 prompts of 1,024 tokens as
a share of the matmul rate on active parameters; and the launches of one layer's experts, router
included. Their microseconds are with the norm before them. The bound of a token is the read of the
weights that it is multiplied by; that of a step of 64 rows counts every expert, as nearly all are
chosen by some row.
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
from workload import VOCAB, Workload, model_folder, uniform_workload

ROWS = (1, 16, 64, 1024)
LAYERS = 8  # per graph, each with rows of its own, so that a layer does not find its weights in L2
PROMPT_LEN = 128
OUTPUT_LEN = 256


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

    def folder(self) -> Path:
        """A folder holding only a config.json, for load_format="dummy"."""
        return model_folder(
            "qwen3-0.6b",
            **asdict(self),
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


def median_seconds(run: Callable[[Workload], float], batch: int, length: int, out: int) -> float:
    """The median of five runs after two; new prompts each time, so that no prefix is cached."""
    times = [run(uniform_workload(batch, length, out, 100 * out + seed)) for seed in range(7)]
    return sorted(times[2:])[2]


def step_milliseconds(run: Callable[[Workload], float], batch: int) -> float:
    """Of a decode step, by the difference of long and short outputs."""
    long, short = (
        median_seconds(run, batch, PROMPT_LEN, length) for length in (OUTPUT_LEN, OUTPUT_LEN // 4)
    )
    return (long - short) / (OUTPUT_LEN - OUTPUT_LEN // 4) * 1e3


def whole_model(shape: Shape, bandwidth: float, flops: float, engine: str) -> dict[str, Any]:
    """Batch 1, batch 64 and prompts, each beside its bound."""
    run = ENGINES[engine](str(shape.folder()), max_model_len=4096, max_num_seqs=64)
    active = shape.parameters(shape.num_experts_per_tok)
    reads = {1: active, 64: shape.parameters(shape.num_experts)}
    figures: dict[str, Any] = {}
    for batch, parameters in reads.items():
        figures[f"batch {batch}"] = {
            "milliseconds": round(step_milliseconds(run, batch), 3),
            "bound": round(2 * (parameters + shape.head) / bandwidth * 1e3, 3),
        }
    seconds = median_seconds(run, 64, 1024, 1)
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


def launches(shape: Shape, arithmetic: str) -> dict[str, Any]:
    """Launches and microseconds of one layer's experts, by rows."""
    kind = nk.arithmetic(arithmetic)
    size, width = shape.hidden_size, shape.moe_intermediate_size

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16, device="cuda") * sizes[-1] ** -0.5

    norm = RMS(torch.ones(size, dtype=torch.bfloat16, device="cuda"))
    router = Scores(kind.weight(draw(shape.num_experts, size)), shape.num_experts_per_tok)
    gate_up, down = draw(shape.num_experts, 2 * width, size), draw(shape.num_experts, size, width)
    experts = kind.experts(nk.DenseExperts(gate_up, down))
    figures = {}
    for rows in ROWS:
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
    parser.add_argument("--save")
    args = parser.parse_args()
    shape = Shape()
    bandwidth, flops = read_ceiling(), matmul_ceiling()  # while the card is empty
    figures = {
        "engine": args.engine,
        "shape": asdict(shape),
        "launches": {name: launches(shape, name) for name in ("fast", "batch_invariant")},
    }
    torch.cuda.empty_cache()
    figures |= whole_model(shape, bandwidth, flops, args.engine)
    report("experts", figures, args.save)


if __name__ == "__main__":
    main()
