"""GGUF files whose blocks stay quantized: values, bytes, ranks, mixed kinds, fallbacks."""

from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from nv_kernels.linear.weight import Dense
from nv_models import TensorParallel, load_model, plan_model
from nv_models.layers.linear import Linear
from nv_models.quantization.gguf import GGUFScheme
from safetensors.torch import save_file

KEPT = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
MIXED = {"v_proj": Kind.Q6_K, "down_proj": Kind.Q6_K, "lm_head": Kind.Q6_K, "": Kind.Q4_K}
"""As llama.cpp's Q4_K_M."""
PROMPT = [(37 * i + 11) % 320 for i in range(24)]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
"""Rows of whole blocks of 256."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def write(tiny_checkpoint, write_gguf, tmp_path):
    """A function that writes a file; returns it, and a folder with its values in floats."""

    def write(kinds, architecture="qwen3", **options):
        folder = tiny_checkpoint(architecture, **{**WIDE, **options})
        kept = write_gguf(folder, tmp_path / "model.gguf", kinds)
        save_file(kept, folder / "model.safetensors")
        return tmp_path / "model.gguf", folder

    return write


def load_records(path, **options):
    plan = plan_model(path, **options)
    arithmetic = replace(
        plan.placement.arithmetic, quantized=lambda record: record, weight=Dense, head=Dense
    )
    return replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()


def matrices(model):
    """Each matrix of a rank in fp32, by its name in the checkpoint."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            weight, regions = module.weight, module.regions(name)
            is_record = isinstance(weight, nk.Quantized)
            values = weight.dense(torch.float32) if is_record else weight.values
            parts = values.split([len(region.rows) for region in regions])
            found |= {region.module: part for region, part in zip(regions, parts, strict=True)}
    head = model.lm_head.head
    values = head.dense(torch.float32) if isinstance(head, nk.Quantized) else head.values
    return found | {"lm_head": values}


@pytest.mark.parametrize("kinds", [*KEPT, MIXED], ids=lambda kinds: getattr(kinds, "name", "mixed"))
@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen3", False)])
def test_values_and_logits(write, paged_runner, kinds, architecture, tied):
    if kinds is MIXED and tied:
        kinds = {"embed_tokens": Kind.Q6_K, **MIXED}
    file, folder = write(kinds, architecture, tie_word_embeddings=tied)
    model, expected = load_records(file, dtype="float32"), load_records(folder, dtype="float32")
    found = matrices(model)
    assert all(torch.equal(found[name], values) for name, values in matrices(expected).items())
    weights = [module.weight for module in model.modules() if isinstance(module, Linear)]
    assert all(isinstance(weight, nk.Blocks) for weight in weights)
    ids = torch.tensor(PROMPT)
    wanted = expected.model.embed_tokens(ids).hidden
    assert torch.equal(model.model.embed_tokens(ids).hidden, wanted)
    logits = paged_runner(load_model(file, dtype="float32")).step(PROMPT)
    wanted = paged_runner(load_model(folder, dtype="float32")).step(PROMPT)
    assert (logits - wanted).norm() < 1e-5 * wanted.norm()
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))


def test_blocks_lie_in_the_mapped_file(write):
    file, _ = write(Kind.Q4_K, tie_word_embeddings=True)
    plan = plan_model(file)
    arithmetic = replace(plan.placement.arithmetic, quantized=lambda record: record)
    model = replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()
    (data,) = plan.placement.scheme._files._data.values()
    mapped = range(data.ctypes.data, data.ctypes.data + len(data))
    weights = [module.weight for module in model.modules() if isinstance(module, Linear)]
    embedding = model.model.embed_tokens.blocks
    assert model.lm_head.head is embedding
    parts = [part for each in (*weights, embedding) for part in each.parts]
    assert len(parts) == 8
    assert all(part.data_ptr() in mapped for part in parts)
    total = sum(each.num_bytes for each in (*weights, embedding))
    assert plan.num_bytes == total + sum(each.nbytes for each in model.parameters())
    values = 320 * 256 + 512 * 256 + 256 * 256 + 3 * 256 * 512  # and 4.5 bits each
    assert total * 8 == 4.5 * values


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_ranks_hold_slices(write, architecture):
    options = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    file, folder = write(MIXED, architecture, **options)
    whole = matrices(load_records(folder, dtype="float32"))
    ranks = [
        matrices(load_records(file, parallel=TensorParallel(rank, 2), dtype="float32"))
        for rank in (0, 1)
    ]
    for name, values in whole.items():
        by_columns = name.endswith(("o_proj", "down_proj"))
        parts = torch.cat([rank[name] for rank in ranks], 1 if by_columns else 0)
        assert torch.equal(parts[: len(values)], values), name


def test_a_share_that_cuts_a_block_is_dequantized_with_one_warning(write):
    file, folder = write(Kind.Q4_K)
    match = r"as floats of 0\.1 MiB, are \S+o_proj: \S+o_proj would be cut at 128 of its 256 col"
    with pytest.warns(UserWarning, match=match) as warned:
        model = load_records(file, parallel=TensorParallel(0, 2), dtype="float32")
    assert len(warned) == 1
    expected = matrices(load_records(folder, parallel=TensorParallel(0, 2), dtype="float32"))
    assert all(torch.equal(each, expected[name]) for name, each in matrices(model).items())
    assert isinstance(model.model.layers[0].mlp.down_proj.weight, nk.Blocks)


def test_a_kind_without_a_product_is_dequantized_with_one_warning(write):
    file, folder = write({"k_proj": Kind.Q2_K, "up_proj": Kind.Q3_K, "": Kind.Q4_K})
    with pytest.warns(UserWarning, match=r"k_proj, .*up_proj.*: Q2_K has no product yet; Q4_0, "):
        model = load_records(file, dtype="float32")
    expected = matrices(load_records(folder, dtype="float32"))
    assert all(torch.equal(each, expected[name]) for name, each in matrices(model).items())


def test_matrices_in_floats_stay_so(write, paged_runner):
    file, folder = write({"down_proj": Kind.F16, "": Kind.Q8_0})
    model = load_records(file, dtype="float32")
    assert isinstance(model.model.layers[0].mlp.down_proj.weight, Dense)
    expected = matrices(load_records(folder, dtype="float32"))
    assert all(torch.equal(each, expected[name]) for name, each in matrices(model).items())


def test_the_option_agrees_or_is_refused(write):
    file, _ = write(Kind.Q4_0)
    assert plan_model(file, quantization="gguf").placement.scheme.name == "gguf"
    with pytest.raises(ValueError, match="'fp8', and the checkpoint is a GGUF file: leave"):
        plan_model(file, quantization="fp8")


def test_blocks_of_zeros_are_refused(write, tiny_checkpoint):
    file, _ = write(Kind.Q4_0, "qwen3")
    plan = plan_model(file)
    info = plan.placement.scheme._files._tensors["model.embed_tokens.weight"]
    data = bytearray(file.read_bytes())
    size = 320 * 256 // 32 * 18
    data[info.offset : info.offset + size] = bytes(size)
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"all zeros, .* are model\.embed_tokens\.weight"):
        load_model(file)


@pytest.mark.parametrize("kinds", [Kind.Q4_0, Kind.Q5_1, Kind.Q4_K, Kind.Q6_K, MIXED], ids=str)
def test_on_a_card_blocks_become_groups(write, monkeypatch, kinds):
    """The plan of a card, with the record that its kernels are made of, on the CPU."""
    file, folder = write(kinds)
    real = GGUFScheme.__init__
    monkeypatch.setattr(GGUFScheme, "__init__", lambda *args, **_: real(*args, is_on_card=True))
    plan = plan_model(file)
    arithmetic = replace(plan.placement.arithmetic, quantized=lambda record: record.grouped())
    model = replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()
    weights = [module.weight for module in model.modules() if isinstance(module, Linear)]
    weights.append(model.lm_head.head)
    assert all(isinstance(weight, nk.Grouped) for weight in weights)
    assert model.model.embed_tokens.blocks is None
    whole = sum(each.num_bytes for each in weights)
    assert plan.num_bytes == whole + sum(each.nbytes for each in model.parameters())
    expected = matrices(load_records(folder, dtype="float32"))
    for name, values in matrices(model).items():
        assert (values - expected[name]).abs().max() <= 2**-10 * expected[name].abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [Kind.Q4_1, MIXED], ids=str)
def test_logits_on_a_card(write, kinds):
    file, folder = write(kinds)
    hidden = torch.randn(5, 256, dtype=torch.bfloat16, device="cuda")
    model, expected = (load_model(each, device="cuda", dtype="bfloat16") for each in (file, folder))
    plain = dict(expected.named_modules())
    for name, ours in model.named_modules():
        if isinstance(ours, Linear) and ours.shape[1] == 256:
            out, wanted = (each.weight.linear(hidden).float() for each in (ours, plain[name]))
            assert (out - wanted).norm() < 1e-2 * wanted.norm()
    out, wanted = (each.lm_head.logits(hidden) for each in (model, expected))
    assert (out - wanted).norm() < 1e-2 * wanted.norm()
