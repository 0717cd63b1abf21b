from pathlib import Path

import pytest
import torch
from nv_engine.config import EngineConfig
from nv_engine.device.memory import (
    GIB,
    BlockNeed,
    TableNeed,
    asked_blocks,
    available_host_memory,
    check_tables,
    check_weights,
    cpu_blocks,
    device_blocks,
    device_budget,
    full_step,
)
from nv_engine.device.trial import TrialSteps
from nv_engine.pooling_params import PoolingParams

NEED = BlockNeed(block_bytes=GIB // 8, all_sequences=10)


def test_cpu_takes_what_is_needed_within_a_quarter() -> None:
    assert cpu_blocks(NEED, available=100 * GIB) == 10
    assert cpu_blocks(NEED, available=4 * GIB) == 8


def test_device_takes_what_is_left() -> None:
    assert device_blocks(NEED, budget=10 * GIB, used=9 * GIB) == 8
    assert device_blocks(NEED, budget=100 * GIB, used=0) == 800


def card_with(monkeypatch: pytest.MonkeyPatch, *, total: int, free: int, ours: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: ours)


def test_k4_another_process_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds 30 % of 80 GiB: 0.4 of the card is free, and so is 0.7; 0.71 is not."""
    card, total = torch.device("cuda", 0), 80 * GIB
    card_with(monkeypatch, total=total, free=54 * GIB, ours=2 * GIB)
    assert device_budget(card, 0.4) == 32 * GIB
    assert device_budget(card, 0.7) == 56 * GIB
    with pytest.raises(ValueError, match=r"0\.71 asks for 56\.8 GiB of 80\.0 .* 56\.0 .* 0\.70"):
        device_budget(card, 0.71)


def test_weights_name_numbers_and_option() -> None:
    check_weights(GIB, GIB, torch.float32, is_share=True)
    with pytest.raises(ValueError, match=r"3\.00 GiB .* 2\.00 GiB: raise gpu_memory"):
        check_weights(3 * GIB, 2 * GIB, torch.float32, is_share=True)
    with pytest.raises(ValueError, match=r'2\.00 GiB: free memory, .* or quantization="fp8"$'):
        check_weights(2 * GIB + 1, 2 * GIB, torch.bfloat16, is_share=False)
    with pytest.raises(ValueError, match=r"a rank in awq and may .* tensor_parallel_size$"):
        check_weights(2 * GIB + 1, 2 * GIB, torch.bfloat16, is_share=False, scheme="awq")


def test_a_step_too_large_names_numbers_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    card_with(monkeypatch, total=80 * GIB, free=GIB, ours=0)
    sentence = full_step(torch.device("cuda", 0), 16384, 512)
    assert "max_num_batched_tokens=16384" in sentence
    assert "max_num_seqs=512" in sentence
    assert "1.00 of the card's 80.00 GiB are free: lower either" in sentence


def test_too_little_names_numbers_and_option() -> None:
    with pytest.raises(ValueError, match=r"0\.12 GiB.*set num_kvcache_blocks"):
        cpu_blocks(NEED, available=GIB // 4)
    with pytest.raises(ValueError, match="raise gpu_memory_utilization"):
        device_blocks(NEED, budget=GIB, used=2 * GIB)


def test_asked_blocks_must_fit() -> None:
    assert asked_blocks(8, NEED, room=GIB) == 8
    with pytest.raises(ValueError, match=r"num_kvcache_blocks=9 needs 1\.1 GiB .*at most 8"):
        asked_blocks(9, NEED, room=GIB)


def test_tables_must_fit_into_a_quarter() -> None:
    need = TableNeed(fixed=GIB // 2, each=GIB // 8)
    check_tables(need, 4 * GIB, max_num_seqs=4, max_model_len=64)
    with pytest.raises(
        ValueError,
        match=r"max_num_seqs=5 .* needs 1\.12 GiB .* 1\.00 of the 4\.00 .* at most 4, or max_model",
    ):
        check_tables(need, 4 * GIB, max_num_seqs=5, max_model_len=64)
    with pytest.raises(ValueError, match=r"max_model_len 64 .*: lower max_model_len$"):
        check_tables(need, 2 * GIB, max_num_seqs=1, max_model_len=64)


def machine(root: Path, available: int, limits: dict[str, tuple[str, str]], own: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(own)
    for folder, (limit, usage) in limits.items():
        path = root / "sys/fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        old = own.startswith("4:memory")
        (path / ("memory.limit_in_bytes" if old else "memory.max")).write_text(limit)
        (path / ("memory.usage_in_bytes" if old else "memory.current")).write_text(usage)
    return root


def test_a_parent_cgroup_binds(tmp_path: Path) -> None:
    limits = {"box": (str(3 * GIB), str(GIB)), "box/job": ("max", str(GIB))}
    root = machine(tmp_path, 64 * GIB, limits, "0::/box/job\n")
    assert available_host_memory(root) == 2 * GIB


def test_version_1_cgroup_binds(tmp_path: Path) -> None:
    limits = {"memory/job": (str(5 * GIB), str(GIB))}
    root = machine(tmp_path, 64 * GIB, limits, "4:memory:/job\n")
    assert available_host_memory(root) == 4 * GIB


def test_without_cgroups_the_kernel_reports_it(tmp_path: Path) -> None:
    assert available_host_memory(machine(tmp_path, 7 * GIB, {}, "")) == 7 * GIB


@pytest.mark.parametrize(
    ("budget", "rows"), [(16384, 512), (16000, 512), (1023, 512), (300, 512), (7, 7), (1999, 1000)]
)
def test_the_trial_step_is_as_large_as_a_step_may_be(budget: int, rows: int) -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=budget, max_num_seqs=rows)
    trial = TrialSteps(config, 4096)
    chunks = trial.prefill().chunks
    assert sum(chunk.num_tokens for chunk in chunks) == budget
    assert all(chunk.num_tokens == len(chunk.token_ids) for chunk in chunks)
    assert [chunk.num_tokens for chunk in chunks] == sorted(chunk.num_tokens for chunk in chunks)
    assert len(chunks) == min(budget, rows)
    following = [(chunk.slot, chunk.start) for chunk in trial.decode().chunks]
    assert following == [(chunk.slot, chunk.num_tokens) for chunk in chunks]


def test_the_trial_step_keeps_to_the_longest_context() -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=1000, max_num_seqs=3)
    assert {chunk.num_tokens for chunk in TrialSteps(config, 200).prefill().chunks} == {199}


def test_16_a_trial_runs_no_step_twice() -> None:
    """Kernels of rows that draw do not differ by the temperature, which pooling rows lack."""
    config = EngineConfig(model="m", max_num_batched_tokens=1000, max_num_seqs=16)
    pooling = TrialSteps(config, 200, PoolingParams(task="embed"))
    assert sorted(len(batch.chunks) for batch in pooling.small()) == [1, 1, 2, 16, 16]
    drawing = TrialSteps(config, 200)
    assert sorted(len(batch.chunks) for batch in drawing.small()) == [1, 1, 2, 16, 16]
    assert [batch.chunks[0].num_tokens for batch in drawing.small()] == [1, 1, 1, 2, 2]
