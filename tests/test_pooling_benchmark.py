"""benchmarks/pooling.py and startup_pooling.py run on a CPU, where their times say nothing."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import pooling  # noqa: PLC0415  # found by the line above

    sizes = {"num_texts": 6, "text_len": 24, "num_pairs": 80, "query_len": 512, "document_len": 5}
    folder = pooling.model_folder("qwen3-0.6b", **pooling.SMALL)
    reranker = pooling.model_folder("qwen3-0.6b", **pooling.SMALL | pooling.RERANKER)
    found = pooling.measure(folder, reranker, 512, **sizes)
    assert found["calls_of_head_and_draw"] == dict.fromkeys(pooling.NEVER, 0)
    assert 0 < found["pairs_with_a_hit"] < 80, "the first step's pairs find nothing"
    assert found["embed_tokens_per_second"] > 0
    params = pooling.SamplingParams(max_tokens=2, ignore_eos=True)
    with pooling.counted() as calls, pooling.opened(folder) as llm:
        llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert min(calls.values()) > 0, f"a run that generates does not call each: {calls}"


@pytest.mark.slow
def test_starts_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import startup_pooling  # noqa: PLC0415  # found by the line above

    folder = startup_pooling.model_folder("qwen3-0.6b", **startup_pooling.SMALL)
    found = startup_pooling.measure(str(folder))
    assert set(found) == {"empty caches", "warm caches"}
    assert all(each[kind] > 0 for each in found.values() for kind in startup_pooling.KINDS)
