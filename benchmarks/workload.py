"""The workloads of the benchmarks: model shapes with dummy weights, requests, and their bound.

The bound counts the bytes and FLOPs that every engine needs: each weight once per step, each cached
token once per step, and the FLOPs of each prompt token.
"""

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QWEN3 = {  # layers, hidden, ffn, q heads, kv heads, tied
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, True),
    "qwen3-4b": (36, 2560, 9728, 32, 8, True),
    "qwen3-8b": (36, 4096, 12288, 32, 8, False),
}
HEAD_DIM = 128
VOCAB = 151936
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "torch_dtype": "float32",
}
"""Changes that make a model which a CPU runs fast."""


def model_folder(name: str, **changes: Any) -> Path:
    """A folder holding only the config.json of one of QWEN3, changed, for load_format="dummy"."""
    folder = Path(tempfile.mkdtemp(prefix=name))
    (folder / "config.json").write_text(json.dumps(model_config(name, **changes)))
    return folder


def model_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of one of QWEN3, changed."""
    layers, hidden, ffn, q_heads, kv_heads, tied = QWEN3[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    } | changes


@dataclass(frozen=True)
class Workload:
    """Prompts as ids, and how many tokens each must produce."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def reference_workload(num_seqs: int = 256, seed: int = 0) -> Workload:
    """nano-vLLM's bench.py, draw for draw: 142,827 prompt and 133,966 output tokens at 256.

    Another seed gives a similar workload, to warm up with prompts that no cache contains.
    """
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(num_seqs)
    ]
    output_lens = [rng.randint(100, 1024) for _ in range(num_seqs)]
    if num_seqs == 256 and seed == 0:
        assert sum(output_lens) == 133_966, "the draw order differs from the published one"
        assert sum(map(len, prompts)) == 142_827
    return Workload(prompts, output_lens)


def uniform_workload(batch: int, prompt_len: int, output_len: int, seed: int = 1) -> Workload:
    """`batch` random prompts of one length."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(prompt_len)] for _ in range(batch)]
    return Workload(prompts, [output_len] * batch)


def chat_workload(num_seqs: int = 1000, seed: int = 0) -> Workload:
    """Prompts and answers of a chat's lengths, log-normal: medians of 148 and 134 tokens, a mean of
    about 220 and 198, at most 2,048 and 1,024.

    Steps of such a list have many shapes: prompts come in ever new company as others end.
    """
    rng = random.Random(seed)
    lens = [(_length(rng, 5.0, 2048), _length(rng, 4.9, 1024)) for _ in range(num_seqs)]
    prompts = [[rng.randint(0, 10000) for _ in range(prompt_len)] for prompt_len, _ in lens]
    return Workload(prompts, [output_len for _, output_len in lens])


def _length(rng: random.Random, log_median: float, most: int) -> int:
    return min(most, max(4, round(rng.lognormvariate(log_median, 0.9))))


def with_other_ids(work: Workload, shift: int) -> Workload:
    """The same lengths with other prompts, so that no prefix cache helps."""
    prompts = [[(token + shift) % 10001 for token in prompt] for prompt in work.prompts]
    return Workload(prompts, work.output_lens)


def weight_parameters(name: str) -> tuple[int, int]:
    """Parameters read by every step: all layers, and the head."""
    layers, hidden, ffn, q_heads, kv_heads, _ = QWEN3[name]
    attention = hidden * HEAD_DIM * (2 * q_heads + 2 * kv_heads)
    return layers * (attention + 3 * hidden * ffn), VOCAB * hidden


def kv_token_bytes(name: str, element_bytes: float = 2) -> float:
    """Bytes of one token's keys and values over all layers."""
    layers, _, _, _, kv_heads, _ = QWEN3[name]
    return 2 * layers * kv_heads * HEAD_DIM * element_bytes


def bound_seconds(
    name: str, work: Workload, bandwidth: float, flops: float, kv_bytes: float = 2
) -> float:
    """Least time for a workload whose sequences all run at once.

    Args:
        name: one of QWEN3, in bf16.
        work: what to run.
        bandwidth: bytes per second that the card reads.
        flops: dense bf16 FLOPs per second that it reaches.
        kv_bytes: bytes of one cached element.
    """
    layers, _, _, q_heads, _, _ = QWEN3[name]
    body, head = weight_parameters(name)
    lens = [(len(prompt), out) for prompt, out in zip(work.prompts, work.output_lens, strict=True)]
    pairs = sum(prompt * prompt / 2 for prompt, _ in lens)
    prefill = sum(prompt for prompt, _ in lens) * 2 * body + pairs * layers * q_heads * HEAD_DIM * 4
    steps = max(out for _, out in lens) - 1
    context = sum((out - 1) * prompt + out * (out - 1) / 2 for prompt, out in lens)
    read = steps * 2 * (body + head) + context * kv_token_bytes(name, kv_bytes)
    return prefill / flops + read / bandwidth
