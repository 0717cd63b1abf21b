"""The first layers of a model launch all of its kernels, so that a start compiles with them alone.

Marked gpu: the kernels are collected as they would be launched.
"""

import importlib.util
from pathlib import Path

import pytest
from nv_engine import Engine, EngineConfig
from nv_engine.device import trial
from nv_engine.device.buckets import batches
from nv_kernels.launch import ahead
from nv_models.config import ModelConfig

TINY = Path(__file__).parents[2] / "nv-models" / "tests" / "tiny_models.py"
SPEC = importlib.util.spec_from_file_location("tiny_models", TINY)
TINY_MODELS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TINY_MODELS)


def kernels_of_a_start(folder, monkeypatch, max_num_seqs=20):
    """The specialisations that a start would compile; it launches none, so that all are new."""
    found = set()

    def collect(kernels, time_limit=0.0):
        found.update(
            f"{kernel.source.name} {kernel.source.signature} {kernel.source.constants} "
            f"{kernel.source.attrs} {kernel.options}"
            for kernel in kernels
        )

    monkeypatch.setattr(ahead, "compile_in_parallel", collect)
    monkeypatch.setattr(ahead.Kernel, "is_on_disk", False)
    Engine(
        EngineConfig(
            model=str(folder), device="cuda", dtype="bfloat16", max_num_batched_tokens=600,
            max_num_seqs=max_num_seqs, kvcache_block_size=64, num_kvcache_blocks=32,
        )
    ).close()  # fmt: skip
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "GptOss"])
def test_the_first_layers_launch_all_kernels(tmp_path, monkeypatch, name):
    folder = TINY_MODELS.write_tiny_model(tmp_path / name, name, head_dim=64)
    few = kernels_of_a_start(folder, monkeypatch)
    monkeypatch.setattr(ModelConfig, "num_trial_layers", ModelConfig.num_layers)
    assert len(few) > 10
    assert kernels_of_a_start(folder, monkeypatch) == few


@pytest.mark.gpu
def test_steps_of_every_size_launch_kernels_of_the_start(tmp_path, monkeypatch):
    """Else a running batch stops for a compilation when it shrinks to that size."""
    folder = TINY_MODELS.write_tiny_model(tmp_path / "all", "Qwen3", head_dim=64)
    some = kernels_of_a_start(folder, monkeypatch, max_num_seqs=600)
    monkeypatch.setattr(trial, "SMALL_STEPS", batches(600))
    monkeypatch.setattr(trial, "FEW_PROMPTS", (1, 2, 5, 16, 17, 100, 128, 129, 500))
    assert kernels_of_a_start(folder, monkeypatch, max_num_seqs=600) == some
