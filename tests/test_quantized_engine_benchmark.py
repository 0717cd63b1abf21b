"""benchmarks/quantized_engine.py runs every form on a CPU, where its times mean nothing."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SHARES = {"fp8 rows": 0.51, "fp8 rows, fp8 KV": 0.51, "fp8 blocks": 0.51, "int8": 0.51,
          "4 bits": 0.28, "AWQ": 0.28}  # fmt: skip
"""Of bf16's bytes in the layers, at most."""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import quantized_engine  # noqa: PLC0415  # found by the line above

    return quantized_engine


def test_every_part_runs(benchmark) -> None:
    form = benchmark.Form("fp8 rows, fp8 KV", "qwen3-8b", small=True)
    found = form.speed(1) | form.size()
    missing = benchmark.COLUMNS.keys() - found.keys()
    assert missing == {"step_of_16_share", "held_share"}, "what needs bf16's figures, or a card"
    lines = benchmark.table({"bf16": found, "int8": {"error": "none"}}).splitlines()
    assert len({len(line.removesuffix("  none")) for line in lines}) == 1


def test_every_form_has_the_bytes_that_it_promises(benchmark) -> None:
    from nv_models import plan_model  # noqa: PLC0415

    def layers(name):
        folder = benchmark.Form(name, "qwen3-8b", small=False).folder
        return plan_model(folder, load_format="dummy").layer_bytes

    assert SHARES.keys() | {"bf16"} == benchmark.FORMS.keys()
    whole = layers("bf16")
    for name, most in SHARES.items():
        assert 0.9 * most < layers(name) / whole <= most, name
