"""The option `quantization`: it agrees with the checkpoint, or quantizes one in floats."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import nv_kernels as nk
import pytest
import torch
from nv_models import TensorParallel, load_model, plan_model
from nv_models.layers.linear import Linear
from safetensors.torch import load_file

W4 = Path(__file__).with_name("quantized") / "w4"
PROMPT = [(37 * i + 11) % 320 for i in range(20)]
FP8 = ["fp8", "fp8_per_channel"]


def load_records(folder, **options):
    plan = plan_model(folder, **options)
    arithmetic = replace(plan.placement.arithmetic, quantized=lambda record: record)
    return plan, replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()


def records(model):
    return {
        region.module: (module.weight, region)
        for name, module in model.named_modules()
        if isinstance(module, Linear)
        for region in module.regions(name)
    }


@pytest.mark.parametrize("option", FP8)
@pytest.mark.parametrize("rank", [None, 1])
def test_a_checkpoint_in_floats_becomes_fp8(float_checkpoint, option, rank):
    parallel = TensorParallel() if rank is None else TensorParallel(rank, 2)
    plan, model = load_records(float_checkpoint, quantization=option, parallel=parallel)
    tensors = load_file(float_checkpoint / "model.safetensors")
    found = records(model)
    assert len(found) == 14
    first = {}
    for module, (weight, region) in found.items():
        assert isinstance(weight, nk.Fp8)
        assert weight.inputs == "token"
        floats = tensors[f"{module}.weight"]
        kept = floats[region.rows.start : region.rows.stop]
        expected = nk.quantize_fp8(kept[:, region.columns.start : region.columns.stop])
        start = first.get(id(weight), 0)
        rows = torch.arange(start, start + len(region.rows))
        first[id(weight)] = start + len(rows)
        assert torch.equal(weight.rows(rows).dense(torch.float32), expected.dense(torch.float32))
    sizes = sum(weight.num_bytes for weight in {id(w): w for w, _ in found.values()}.values())
    head = model.lm_head.head.values.nbytes
    assert plan.num_bytes == sizes + head + sum(each.nbytes for each in model.parameters())


def test_rows_are_quantized_some_at_a_time(float_checkpoint, monkeypatch):
    _, whole = load_records(float_checkpoint, quantization="fp8")
    monkeypatch.setattr("nv_models.quantization.float_to_fp8.VALUES", 1000)
    _, found = load_records(float_checkpoint, quantization="fp8")
    for module, (weight, _) in records(found).items():
        wanted = records(whole)[module][0].dense(torch.float32)
        assert torch.equal(weight.dense(torch.float32), wanted)


def test_random_weights_are_quantized(float_checkpoint, paged_runner):
    options = {"load_format": "dummy", "quantization": "fp8", "dtype": "float32"}
    plan, model = load_records(float_checkpoint, **options)
    kinds = [type(weight) for weight, _ in records(model).values()]
    assert kinds == [nk.Fp8] * 14
    logits = paged_runner(model).step(PROMPT)
    assert logits.isfinite().all()
    assert logits.std(0).min() > 0
    assert plan.num_bytes < plan_model(float_checkpoint).num_bytes


def test_a_config_may_ask_for_it(float_checkpoint, tmp_path):
    folder = shutil.copytree(float_checkpoint, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "is_checkpoint_fp8_serialized": False,
        "ignored_layers": ["model.layers.0.mlp.down_proj"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    _, model = load_records(folder, quantization="fp8")
    floats = {
        module
        for module, (weight, _) in records(model).items()
        if not isinstance(weight, nk.Quantized)
    }
    assert floats == {"model.layers.0.mlp.down_proj"}


@pytest.mark.parametrize("option", [None, "compressed-tensors"])
def test_an_option_that_agrees_changes_nothing(option):
    plan, model = load_records(W4, quantization=option)
    assert plan.placement.scheme.name == "compressed-tensors"
    assert {type(weight) for weight, _ in records(model).values()} == {nk.Grouped}


@pytest.mark.parametrize("option", ["fp8", "awq_marlin"])
def test_an_option_that_disagrees_is_refused(option):
    message = f"'{option}', and the checkpoint is quantized as 'compressed-tensors': leave"
    with pytest.raises(ValueError, match=message):
        load_model(W4, quantization=option)


@pytest.mark.parametrize("option", ["awq", "gptq", "compressed-tensors"])
def test_floats_do_not_become_what_needs_data(float_checkpoint, option):
    with pytest.raises(ValueError, match=f"quantization is '{option}', .* checkpoint is in floats"):
        load_model(float_checkpoint, quantization=option)


def test_another_option_is_not_built(float_checkpoint):
    with pytest.raises(NotImplementedError, match="'bitsandbytes' is not built: it must be one of"):
        load_model(float_checkpoint, quantization="bitsandbytes")
