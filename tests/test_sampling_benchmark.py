"""benchmarks/sampling.py runs every one of its cases on a CPU, where its figures say nothing."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sampling  # noqa: PLC0415  # found by the line above

    folder = sampling.small_folder()
    found = sampling.measure(folder, batch=3, prompt_len=4, output_len=9, repeats=1, profile=False)
    assert set(found["over_plain"]) == set(sampling.CASES)
    assert all(each > 0 for each in found["ms_per_step"].values())
    assert found["over_plain"]["plain"] == 1
