"""benchmarks/pooling.py runs every one of its parts on a CPU, where its times say nothing."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import pooling  # noqa: PLC0415  # found by the line above

    sizes = {"num_texts": 6, "text_len": 24, "num_pairs": 80, "query_len": 512, "document_len": 5}
    found = pooling.measure(pooling.small_folder(), 512, **sizes)
    assert found["calls_of_head_and_draw"] == dict.fromkeys(pooling.NEVER, 0)
    assert 0 < found["pairs_with_a_hit"] < 80, "the first step's pairs find nothing"
    assert found["embed_tokens_per_second"] > 0
