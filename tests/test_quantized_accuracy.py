"""benchmarks/quantized_accuracy.py: what its checkpoints hold, and which figures are larger."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import nv_kernels as nk
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from nv_models import plan_model
from nv_models.layers.linear import Linear

ROOT = Path(__file__).parent.parent
TRAINED = ROOT / "packages" / "nv-engine" / "tests" / "numerics" / "checkpoint"
FOUR, EIGHT, E4M3 = 1 / 15, 1 / 255, 1 / 16
LARGEST_ERRORS = {
    "fp8, a scale per matrix": E4M3, "fp8, blocks of 128": E4M3, "W8A8": EIGHT,
    "W8A16, groups of 128": EIGHT, "W4A16, groups of 128": FOUR, "W4A16, groups of 32": FOUR,
    "AWQ, groups of 128": FOUR, "AWQ, groups of 32": FOUR, "GPTQ, 4 bits, groups of 128": FOUR,
}  # fmt: skip
"""Half a step, as a share of the matrix's largest value."""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import quantized_accuracy  # noqa: PLC0415  # found by the line above

    return quantized_accuracy


def matrices(path):
    """Each matrix of a checkpoint in fp32, as its records have it."""
    plan = plan_model(path, dtype="float32")
    arithmetic = replace(plan.placement.arithmetic, quantized=lambda record: record)
    model = replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            assert isinstance(module.weight, nk.Quantized), name
            regions = module.regions(name)
            sizes = [len(region.rows) for region in regions]
            parts = module.weight.dense(torch.float32).split(sizes)
            found |= {
                f"{region.module}.weight": part for region, part in zip(regions, parts, strict=True)
            }
    return found


def test_values_are_within_half_a_step(benchmark, tmp_path) -> None:
    source = benchmark.Floats.read(TRAINED)
    schemes = benchmark.schemes(source)
    assert schemes.keys() == LARGEST_ERRORS.keys()
    for name, scheme in schemes.items():
        found = matrices(source.write(tmp_path / name, scheme))
        assert len(found) == 35, name
        for matrix, values in found.items():
            wanted = source.tensors[matrix].float()
            error = (values - wanted).abs().max() / wanted.abs().max()
            most = LARGEST_ERRORS[name]
            assert most / 20 < error < most * 1.07, (name, matrix)  # a scale is rounded to bf16


@pytest.mark.parametrize(("kind", "step"), [("Q4_K", 15), ("Q5_K", 31), ("Q6_K", 62)])
def test_k_quants_are_read_back_within_half_a_step(benchmark, kind, step) -> None:
    """Zeros, a block of one sign and a block with one large group keep their values too."""
    import k_quants  # noqa: PLC0415  # found by the fixture

    values = np.random.default_rng(3).normal(size=(8, 512)).astype(np.float32)
    values[0, :256], values[1], values[2, :32] = 0, np.abs(values[1]), 20 * values[2, :32]
    packed = k_quants.quantize_k(values, kind)
    read = dequantize(packed, GGMLQuantizationType[kind])
    error = np.abs(read - values).reshape(8, 2, -1).max(2)
    spans = values.reshape(8, 2, -1).max(2).clip(0) - values.reshape(8, 2, -1).min(2).clip(max=0)
    largest = 2 * np.abs(values).reshape(8, 2, -1).max(2) if kind == "Q6_K" else spans
    half = largest / step / 2
    assert (error <= 1.6 * half).all()  # a scale, or a min, is rounded to 1 / 63 of the largest
    assert (error[3:] > 0.6 * half[3:]).all()
    assert not read[0, :256].any()


def test_more_bits_are_nearer(benchmark, tmp_path) -> None:
    source = benchmark.Floats.read(TRAINED)
    passages = benchmark.passages_of(str(TRAINED), None, 2, 100)
    found, truth = {}, None
    for name, form in benchmark.forms(source, str(TRAINED), tmp_path):
        answer = benchmark.answer(form, passages, "cpu")
        truth = truth or answer
        found[name] = benchmark.compared(answer, truth)
    assert found["bf16"]["mean_kl"] == 0
    assert found["bf16"]["agreement_percent"] == 100
    groups = [
        ("fp32",),
        ("W8A16, groups of 128", "GGUF Q8_0"),
        ("fp8 made while loading", "fp8, blocks of 128", "fp8, a scale per matrix"),
        ("GGUF Q4_1", "AWQ, groups of 128", "W4A16, groups of 128"),
    ]
    for nearer, farther in pairwise(groups):
        assert max(found[name]["mean_kl"] for name in nearer) < min(
            found[name]["mean_kl"] for name in farther
        )
    for name, each in found.items():
        assert each["mean_kl"] >= 0
        assert math.isfinite(each["largest_kl"])
        if name.startswith(("W4", "AWQ", "GPTQ")):
            assert each["layers_of_bf16"] < 0.3


LABELS = {  # by the name of a form of the trained checkpoint: the demo's, and the table's
    "fp32": ("fp32", "fp32, for comparison"),
    "W8A16, groups of 128": ("W8A16, groups of 64", "W8A16, groups of 128 (demo: 64)"),
    "GGUF Q8_0": ("GGUF Q8_0", "GGUF Q8_0"),
    "W8A8": ("W8A8", "W8A8"),
    "fp8 made while loading": ("fp8 made while loading", 'fp8, `quantization="fp8"`'),
    "fp8, a scale per matrix": ("fp8, a scale per matrix", "fp8, a scale per matrix"),
    "fp8, blocks of 128": (None, "fp8, blocks of 128 x 128"),
    "GGUF Q6_K": ("GGUF Q6_K", "GGUF Q6_K (else Q8_0)"),
    "GGUF Q5_1": ("GGUF Q5_1", "GGUF Q5_1"),
    "GGUF Q5_K": ("GGUF Q5_K", "GGUF Q5_K (else Q5_1)"),
    "GGUF Q5_0": ("GGUF Q5_0", "GGUF Q5_0"),
    "GGUF Q4_K": ("GGUF Q4_K", "GGUF Q4_K (else Q5_0)"),
    "GGUF Q4_1": ("GGUF Q4_1", "GGUF Q4_1"),
    "AWQ, groups of 32": ("AWQ, groups of 32", "AWQ, groups of 32"),
    "GGUF Q4_0": ("GGUF Q4_0", "GGUF Q4_0"),
    "W4A16, groups of 32": ("W4A16, groups of 32", "W4A16, groups of 32"),
    "AWQ, groups of 128": ("AWQ, groups of 64", "AWQ, groups of 128 (demo: 64)"),
    "GPTQ, 4 bits, groups of 128": (
        "GPTQ, 4 bits, groups of 64", "GPTQ, 4 bits, groups of 128 (demo: 64)",
    ),
    "W4A16, groups of 128": ("W4A16, groups of 64", "W4A16, groups of 128 (demo: 64)"),
}  # fmt: skip


def test_the_table_has_the_figures_of_the_results() -> None:
    trained, demo = (
        json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        for name in ("quantized_accuracy_trained", "quantized_accuracy")
    )
    assert trained["places"] == demo["places"] == 2000
    assert trained["forms"].keys() == LABELS.keys() | {"bf16"}
    others = {other for other, _ in LABELS.values() if other}
    assert demo["forms"].keys() == others | {"bf16", "its own file"}
    page = (ROOT / "docs" / "quantization.md").read_text()
    for name, (other, label) in LABELS.items():
        cells = [label, f"{trained['forms'][name]['layers_of_bf16']:.2f}"]
        for figures in (trained["forms"][name], demo["forms"].get(other)):
            cells += thousandths(figures) if figures else ["-", "-"]
        line = f"| {' | '.join(cells)} |"
        assert line in page.splitlines(), line
    own = demo["forms"]["its own file"]
    assert "KL {}, the same token at {}".format(*thousandths(own)) in page


def thousandths(figures) -> list[str]:
    """The KL divergence in 0.001 nats, and the agreement."""
    kl = float(f"{1e3 * figures['mean_kl']:.2g}")
    return [f"{kl:g}", f"{figures['agreement_percent']:.1f} %"]
