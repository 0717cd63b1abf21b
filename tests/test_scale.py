"""The model of scale on paper: values that a hand can check, and the tables in docs/scale.md."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scale  # noqa: PLC0415  # found by the line above

    return scale


def test_sizes_of_8b(scale) -> None:
    """Qwen3-8B: 36 layers, hidden 4096, ffn 12288, 32 query and 8 KV heads of 128."""
    one, two = scale.Replica("qwen3-8b"), scale.Replica("qwen3-8b", 2)
    attention = 4096 * (32 * 128 + 8 * 128 + 8 * 128 + 32 * 128)
    assert one.body == 36 * (attention + 3 * 4096 * 12288) == 6_945_767_424
    assert one.head == 622_329_856
    assert one.resident_bytes == 2 * (6_945_767_424 + 2 * 622_329_856) == 16_380_854_272
    assert one.kv_token_bytes == 2 * 36 * 8 * 128 * 2 == 147_456
    assert two.kv_token_bytes == 147_456 / 2
    assert scale.Replica("qwen3-32b", 8).kv_token_bytes == 2 * 64 * 1 * 128 * 2
    assert one.room == (72_000_000_000 - 4_000_000_000 - 16_380_854_272) // 147_456 == 350_064


def test_a_batch_1_step_of_8b(scale) -> None:
    """Weights 15.136 GB at 3.08 TB/s; attention and kernels at their floors; 72 sums of 8 KiB."""
    weights = 15_136_194_560 / 3.08e12
    floors = 36 * (5.9e-6 + 6.4e-6)
    assert scale.Replica("qwen3-8b").decode(1, 256) == pytest.approx(weights + floors)
    # half of the logits, 151,936 bytes, lies between 64 KiB (8.6 us) and 256 KiB (10.1 us)
    gathered = 8.6e-6 + 1.5e-6 * (151_936 - 65_536) / (262_144 - 65_536)
    two = scale.Replica("qwen3-8b", 2)
    assert two.collectives(1, 1) == pytest.approx(72 * 1.8e-6 + gathered)
    assert two.decode(1, 256) == pytest.approx(weights / 2 + floors + 72 * 1.8e-6 + gathered)


def test_a_large_step_of_8b(scale) -> None:
    """256 sequences of 1,024 tokens: 38.65 GB of keys and values at 95 % of 3.08 TB/s."""
    cached = 256 * 1024 * 147_456 / (0.95 * 3.08e12)
    products = 2 * (6_945_767_424 + 622_329_856) * 256 / 735e12  # above the read of the weights
    assert products > 15_136_194_560 / 3.08e12
    step = scale.Replica("qwen3-8b").decode(256, 256 * 1024)
    assert step == pytest.approx(products + cached + 36 * 25.9e-6)


def test_sums_inside_the_norm(scale) -> None:
    """256 rows of 4,096 are 2 MiB; between 8 and 128 MiB a line; of four ranks each sends three."""
    two, four = scale.Replica("qwen3-8b", 2), scale.Replica("qwen3-8b", 4)
    assert two.layer_sum(256) == pytest.approx(7.1e-6)
    assert two.layer_sum(2 * 16384) == pytest.approx(2 * 304e-6)
    assert four.layer_sum(256) == pytest.approx(7.1e-6 + (20.7e-6 - 7.1e-6) * 4 / 6)
    assert four.layer_sum(257) == four.all_reduce(257 * 8192)


def test_a_large_sum(scale) -> None:
    """2 MiB take NCCL 29 us; what is beyond crosses the link 2 (t - 1) / t times."""
    assert scale.Replica("qwen3-8b", 2).all_reduce(2 << 20) == pytest.approx(29e-6)
    four = scale.Replica("qwen3-8b", 4).all_reduce((2 << 20) + 300e6)
    assert four == pytest.approx(1.3 * 29e-6 + 1.5e-3)


def test_a_thousand_nodes(scale) -> None:
    """8,000 replicas that take 16 s for 256 prompts."""
    cluster = scale.Cluster(scale.Replica("qwen3-8b"), 1000, 16.0)
    assert cluster.replicas == 8000
    assert cluster.tokens_per_second == 8000 * 133_966 / 16
    assert cluster.prompts_per_second == 8000 * 16
    assert cluster.driver_tasks_per_second == 125
    assert cluster.batch_seconds == 64
    assert cluster.load_seconds == pytest.approx(163.80854)
    assert cluster.failures_per_hour == pytest.approx(0.15786, rel=1e-4)
    assert cluster.lost_share == pytest.approx(0.15786 / 3600 * 109 / 1000, rel=1e-4)


def test_the_document_holds_the_tables(scale) -> None:
    text = scale.DOCUMENT.read_text()
    assert scale.tables() in text, "run benchmarks/scale.py --write"
