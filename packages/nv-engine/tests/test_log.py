"""The six lines of a start: each once, from one rank or several, and only where asked for."""

import logging
import subprocess
import sys

import pytest
from nv_engine import Engine, EngineConfig

FIRST_WORDS = ["model:", "attention", "KV", "kernels:", "ranks:", "ready"]
START = """
import sys
from nv_engine import Engine, EngineConfig
Engine(EngineConfig(model=sys.argv[1], device="cpu", max_num_seqs=2)).close()
"""


def first_words(lines):
    return [line.split()[0] for line in lines]


def start(checkpoint, caplog, **options):
    with caplog.at_level(logging.INFO, logger="nv"):
        config = EngineConfig(model=str(checkpoint), device="cpu", max_num_seqs=2, **options)
        Engine(config).close()
    return [record.getMessage() for record in caplog.records if record.name == "nv"]


def test_a_start_logs_six_lines(checkpoint, caplog):
    model, backend, cache, kernels, ranks, ready = start(
        checkpoint, caplog, num_kvcache_blocks=3, kvcache_block_size=32
    )
    assert model == f"model: {checkpoint} (Qwen3ForCausalLM), torch.float32 on cpu"
    assert backend.startswith("attention backend: cpu (auto: the device is 'cpu'")
    assert cache == "KV cache: 3 blocks, 96 tokens, torch.float32"
    assert kernels.endswith("CUDA graphs: none")
    assert ranks == "ranks: 1, in this process"
    assert ready.endswith("up to 2 sequences of 512 tokens")


@pytest.mark.slow
def test_of_two_ranks_the_first_alone_logs(checkpoint, caplog):
    lines = start(checkpoint, caplog, tensor_parallel_size=2, num_kvcache_blocks=3)
    assert first_words(lines) == FIRST_WORDS
    assert lines[4].startswith("ranks: 2 (process ")


def test_without_nv_log_a_start_prints_nothing(checkpoint, monkeypatch, capfd):
    monkeypatch.delenv("NV_LOG", raising=False)
    Engine(EngineConfig(model=str(checkpoint), device="cpu", max_num_seqs=2)).close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_nv_log_shows_the_lines_on_stderr(checkpoint, monkeypatch):
    monkeypatch.setenv("NV_LOG", "info")
    command = [sys.executable, "-c", START, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    lines = [line.split(" INFO nv: ") for line in done.stderr.splitlines()]
    assert first_words(message for _, message in lines) == FIRST_WORDS


def test_nv_log_is_a_level(checkpoint, monkeypatch):
    monkeypatch.setenv("NV_LOG", "loud")
    with pytest.raises(ValueError, match="NV_LOG is 'loud': it must be one of debug, info,"):
        Engine(EngineConfig(model=str(checkpoint), device="cpu"))
