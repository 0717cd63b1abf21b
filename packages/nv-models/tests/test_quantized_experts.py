"""Quantized experts stay in their records: values, logits, bytes, ranks and fallbacks."""

import warnings
from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from nv_kernels.linear.weight import Dense
from nv_models import TensorParallel, load_model, plan_model
from nv_models.layers.experts import ExpertMLPs
from nv_models.layers.linear import ColumnLinear, Linear
from safetensors.torch import load_file, save_file

PROMPT = [(37 * i + 11) % 320 for i in range(40)]


WEIGHT_ONLY = ("W4A16", "AWQ", "GPTQ", "GPTQ 8")
QUANTIZED_INPUTS = ("fp8", "fp8 rows", "fp8 static", "int8")
NAMES = (*WEIGHT_ONLY, *QUANTIZED_INPUTS)


@pytest.fixture
def write(tiny_checkpoint, packed, experts_writer, tmp_path):
    """A function that writes a checkpoint of a format; returns it, and its values in floats."""

    def write(name, **options):
        return experts_writer.write_experts(
            name, tmp_path / name, tiny_checkpoint, packed, **options
        )

    return write


def load_plainly(path, **options):
    """A model whose experts and linear layers are the records themselves."""
    plan = plan_model(path, **options)
    kept = {"quantized": lambda record: record, "quantized_experts": lambda plain: plain}
    arithmetic = replace(plan.placement.arithmetic, **kept)
    return replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()


def experts(model):
    return [module.experts for module in model.modules() if isinstance(module, ExpertMLPs)]


def values_of(records):
    return torch.stack([record.dense(torch.float32) for record in records])


def gate_up_of(by):
    """[E, 2F, K]."""
    return torch.cat((values_of(by.gates), values_of(by.ups)), dim=1)


def greedy(runner, count=12):
    """The ids that a runner of one sequence draws after the prompt."""
    ids = [int(runner.step(PROMPT)[-1].argmax())]
    while len(ids) < count:
        ids.append(int(runner.step(ids[-1:])[-1].argmax()))
    return ids


@pytest.fixture
def _strictly():
    """A warning of a dequantized matrix is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("_strictly")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [None, 1])
def test_values_are_those_of_the_format(write, name, rank):
    folder, source = write(name)
    parallel = TensorParallel() if rank is None else TensorParallel(rank, 2)
    expected = experts(load_model(source, dtype="float32", parallel=parallel))
    model = load_plainly(folder, dtype="float32", parallel=parallel)
    assert len(expected) == 2
    for ours, theirs in zip(experts(model), expected, strict=True):
        assert isinstance(ours, nk.QuantizedExperts)
        assert torch.equal(gate_up_of(ours), theirs.gate_up)
        assert torch.equal(values_of(ours.downs), theirs.down)
    attention = [each for each in model.modules() if isinstance(each, ColumnLinear)]
    assert len(attention) == 2
    assert not any(isinstance(each.weight, Dense) for each in attention)


@pytest.mark.usefixtures("_strictly")
@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize("arithmetic", ["fast", "batch_invariant"])
def test_logits_and_ids_are_those_of_the_values(write, paged_runner, name, arithmetic):
    folder, source = write(name)
    ours = load_model(folder, dtype="float32", arithmetic=arithmetic)
    theirs = load_model(source, dtype="float32", arithmetic=arithmetic)
    logits, wanted = (paged_runner(model).step(PROMPT) for model in (ours, theirs))
    assert (logits - wanted).norm() < 1e-5 * wanted.norm()
    assert greedy(paged_runner(ours)) == greedy(paged_runner(theirs))


@pytest.mark.usefixtures("_strictly")
@pytest.mark.parametrize("name", QUANTIZED_INPUTS)
def test_logits_with_quantized_inputs_are_those_of_the_definition(write, paged_runner, name):
    """An ulp can flip a code, which later tokens attend to: only those before it are close."""
    folder, source = write(name)
    ours, defined = load_model(folder, dtype="float32"), load_plainly(folder, dtype="float32")
    logits, wanted, floats = (
        paged_runner(model).step(PROMPT)
        for model in (ours, defined, load_model(source, dtype="float32"))
    )
    away = (logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)

    assert (away < 1e-5).any()
    assert (logits - wanted).norm() < 0.5 * (floats - wanted).norm()


@pytest.mark.parametrize("name", ["fp8 static"])
def test_experts_share_the_largest_static_scale(write, name):
    folder, _ = write(name)
    tensors = load_file(folder / "model.safetensors")
    by = experts(load_plainly(folder, dtype="float32"))[0]
    for fields, ends in (
        (("gates", "ups"), ("gate_proj", "up_proj")),
        (("downs",), ("down_proj",)),
    ):
        largest = max(
            float(value)
            for key, value in tensors.items()
            if key.startswith("model.layers.0.mlp.experts.")
            and key.endswith(tuple(f"{end}.input_scale" for end in ends))
        )
        assert {each.inputs for field in fields for each in getattr(by, field)} == {largest}


SHARES = {"W4A16": 0.29, "AWQ": 0.31, "GPTQ": 0.31, "fp8": 0.51, "fp8 rows": 0.52, "int8": 0.52}
"""Of bf16's bytes; groups are of 32 columns here, and rows of 128 and 256."""


@pytest.mark.parametrize("name", SHARES)
def test_bytes_are_those_that_were_planned(write, name):
    folder, source = write(name, moe_intermediate_size=512)
    plan = plan_model(folder, dtype="bfloat16")
    model = load_plainly(folder, dtype="bfloat16")
    records = sum(each.num_bytes for each in experts(model))
    matrices = [module for module in model.modules() if isinstance(module, Linear)]
    weights = [module.weight for module in matrices]
    held = records + sum(each.num_bytes for each in weights if isinstance(each, nk.Quantized))
    held += sum(each.values.nbytes for each in weights if isinstance(each, Dense))
    held += sum(each.nbytes for each in model.parameters()) + model.lm_head.head.values.nbytes
    assert 0.99 * plan.num_bytes < held < 1.01 * plan.num_bytes
    floats = 2 * 3 * 4 * 512 * 128 * 2
    assert records <= SHARES[name] * floats
    assert plan.layer_bytes < 0.65 * plan_model(source, dtype="bfloat16").layer_bytes


def test_an_order_of_columns_is_dequantized_with_one_warning(write, paged_runner):
    folder, source = write("ordered")
    size = 2 * 3 * 4 * 256 * 128 * 4 / 2**20  # 2 layers of 3 matrices of 4 experts, in fp32
    match = rf"as floats of {size:.1f} MiB, are model\.layers\.0\.mlp\.experts, model\.layers\.1"
    with pytest.warns(UserWarning, match=match) as warned:
        model = load_model(folder, dtype="float32")
    assert len(warned) == 1
    assert "not all experts of the layer stay quantized" in str(warned[0].message)
    wanted = paged_runner(load_model(source, dtype="float32")).step(PROMPT)
    assert (paged_runner(model).step(PROMPT) - wanted).norm() < 1e-4 * wanted.norm()
    plan = plan_model(folder, dtype="float32")
    assert plan.num_bytes > 2 * 3 * 4 * 256 * 128 * 4


def test_a_layer_with_an_expert_in_floats_is_dequantized(write, paged_runner):
    folder, source = write("W4A16", ends=".1.mlp.experts.2.up_proj")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"Linear"', r'"re:.*1.mlp.experts.2.up_proj"'))
    with pytest.warns(UserWarning, match=r"are model\.layers\.1\.mlp\.experts: not all experts"):
        model = load_model(folder, dtype="float32")
    wanted = paged_runner(load_model(source, dtype="float32")).step(PROMPT)
    assert (paged_runner(model).step(PROMPT) - wanted).norm() < 1e-5 * wanted.norm()


def test_all_tensors_that_do_not_fit_are_listed(write):
    folder, _ = write("fp8")
    tensors = load_file(folder / "model.safetensors")
    scale = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    del tensors[scale]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{scale} \[2, 1\] is missing"):
        load_model(folder)


@pytest.mark.usefixtures("_strictly")
@pytest.mark.parametrize("name", NAMES)
def test_dummy_weights(write, paged_runner, name):
    folder, _ = write(name)
    model = load_plainly(folder, dtype="float32", load_format="dummy")
    logits = paged_runner(model).step(PROMPT)
    assert logits.isfinite().all()
    assert logits.std(0).min() > 0
    for each in experts(model):
        assert 0.005 < gate_up_of(each).std() < 0.1
    logits = paged_runner(load_model(folder, dtype="bfloat16", load_format="dummy")).step(PROMPT)
    assert logits.isfinite().all()


@pytest.mark.usefixtures("_strictly")
def test_floats_are_quantized_while_they_load(write, paged_runner):
    _, source = write("W4A16")
    by = experts(load_plainly(source, dtype="float32", quantization="fp8"))[1]
    floats = experts(load_model(source, dtype="float32"))[1]
    expected = nk.quantize_fp8(floats.down[2])
    assert torch.equal(by.downs[2].codes.float(), expected.codes.float())
    assert torch.equal(by.downs[2].scale, expected.scale)
    plan = plan_model(source, dtype="bfloat16", quantization="fp8")
    assert plan.layer_bytes < 0.55 * plan_model(source, dtype="bfloat16").layer_bytes
    model = load_model(source, dtype="float32", quantization="fp8")
    logits = paged_runner(model).step(PROMPT)
    wanted = paged_runner(load_model(source, dtype="float32")).step(PROMPT)
    assert (logits - wanted).norm() < 0.2 * wanted.norm()


def test_stacks_of_codes_are_refused(tiny_model):
    scheme = {"quant_method": "fp8", "modules_to_not_convert": ["router"]}
    with pytest.raises(NotImplementedError, match=r"0\.mlp\.experts are quantized \(fp8\), which"):
        load_model(tiny_model("GptOss"), hf_overrides={"quantization_config": scheme})


class TestGGUF:
    @pytest.fixture(autouse=True)
    def _own_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    @pytest.fixture
    def file(self, tiny_checkpoint, write_gguf, experts_writer, tmp_path):
        """A function that writes a file; returns it, and a folder with its values in floats."""

        def write(kinds, **options):
            sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 1}
            folder = tiny_checkpoint("qwen3_moe", **{**experts_writer.MOE, **sizes, **options})
            kept = write_gguf(folder, tmp_path / "model.gguf", kinds)
            save_file(kept, folder / "model.safetensors")
            return tmp_path / "model.gguf", folder

        return write

    @pytest.mark.usefixtures("_strictly")
    @pytest.mark.parametrize(
        "kinds",
        [Kind.Q4_0, Kind.Q8_0, Kind.Q4_K, {"down_proj": Kind.Q6_K, "down_exps": Kind.Q6_K,
                                          "": Kind.Q4_K}],
        ids=["Q4_0", "Q8_0", "Q4_K", "mixed"],
    )  # fmt: skip
    @pytest.mark.parametrize("rank", [None, 1])
    def test_blocks_are_used_where_they_lie(self, file, paged_runner, kinds, rank):
        path, folder = file(kinds)
        parallel = TensorParallel() if rank is None else TensorParallel(rank, 2)
        model = load_plainly(path, dtype="float32", parallel=parallel)
        by_scheme = model.model.layers[0].mlp.experts.placement.scheme
        (expected,) = experts(load_model(folder, dtype="float32", parallel=parallel))
        (by,) = experts(model)
        assert torch.equal(gate_up_of(by), expected.gate_up)
        assert torch.equal(values_of(by.downs), expected.down)
        parts = [part for records in by.records.values() for each in records for part in each.parts]
        assert len(parts) == 3 * 4
        (data,) = by_scheme._files._data.values()
        mapped = range(data.ctypes.data, data.ctypes.data + len(data))
        assert all(part.data_ptr() in mapped for part in parts)
        if rank is None:
            ours, theirs = (load_model(each, dtype="float32") for each in (path, folder))
            logits, wanted = (paged_runner(each).step(PROMPT) for each in (ours, theirs))
            assert (logits - wanted).norm() < 1e-5 * wanted.norm()
            assert greedy(paged_runner(ours)) == greedy(paged_runner(theirs))
