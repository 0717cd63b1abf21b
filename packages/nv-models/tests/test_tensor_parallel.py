"""Two ranks over gloo give the logits of one."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import torch
from nv_models import load_model

WORKER = Path(__file__).parent / "tensor_parallel_worker.py"
CASES = {
    "untied": ("qwen3", {}),
    "tied, padded vocabulary, one KV head": (
        "qwen3",
        {"tie_word_embeddings": True, "vocab_size": 333, "num_key_value_heads": 1},
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 333}),
}
QUANTIZED = ("w4", "w8_asym", "fp8_tensor", "mixed")
"""A product that quantizes x per token does so on each rank, so that only others equal."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


EXPERTS = ("W4A16", "AWQ", "GPTQ")
ADAPTED = ("untied", "biases")
"""The second has a vocabulary that is padded on each rank."""


def test_two_ranks_equal_one(
    tiny_checkpoint, tiny_models, tiny_model, tiny_post_norm, paged_runner, adapters, packed,
    experts_writer, tmp_path,
):  # fmt: skip
    folders = {
        name: tiny_checkpoint(kind, name, **options) for name, (kind, options) in CASES.items()
    }
    folders |= {name: tiny_model(name) for name in tiny_models.CASES}
    folders["norms after, a narrow embedding"] = tiny_post_norm
    for name in QUANTIZED:
        folders[name] = tmp_path / name
        shutil.copytree(WORKER.with_name("quantized") / name, folders[name])
    for name in EXPERTS:
        folders[name], _ = experts_writer.write_experts(
            name, tmp_path / name, tiny_checkpoint, packed
        )
    for name in ADAPTED:
        modules = (*adapters.LAYER, adapters.EMBEDDING, "lm_head")
        adapters.write_adapter(folders[name] / "adapter", folders[name], modules)
    port = str(free_port())
    ranks = [
        subprocess.Popen([sys.executable, WORKER, str(rank), "2", port, *folders.values()])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for name, folder in folders.items():
        runner = paged_runner(load_model(folder, dtype="float32"))
        expected = torch.cat([runner.step(range(3, 43)), runner.step([5]), runner.step([6])])
        if name in ADAPTED:
            tokens = [*range(3, 43), 5, 6]
            expected = adapters.merged_logits(folder, folder / "adapter", tokens)
        for rank in range(2):
            logits = torch.load(folder / f"logits.{rank}")
            assert logits.shape == expected.shape, name
            error = (logits - expected).abs().max()
            assert error <= 1e-4, f"{name}, rank {rank}: {error}"
