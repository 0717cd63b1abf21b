"""AWQ and GPTQ: random codes are written, and their values read back."""

import json
import re
from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from nv_kernels.linear.weight import Dense
from nv_models import TensorParallel, describe, load_model, plan_model
from nv_models.layers.linear import Linear
from safetensors.torch import load_file, save_file

PROMPT = [(37 * i + 11) % 320 for i in range(20)]
PROJ = "_proj"
CASES = {
    "awq": ("awq", {}),
    "awq, a scale per row": ("awq", {"group_size": -1}),
    "gptq": ("gptq", {}),
    "gptq, symmetric": ("gptq", {"sym": True}),
    "gptq, 8 bits": ("gptq", {"bits": 8, "group_size": 64}),
    "gptq, 8 bits, symmetric, a scale per row": (
        "gptq",
        {"bits": 8, "group_size": -1, "sym": True},
    ),
    "gptq_v2": ("gptq_v2", {}),
    "gptq_v2, 8 bits": ("gptq_v2", {"bits": 8}),
    "desc_act": ("gptq", {"desc_act": True}),
    "desc_act, 8 bits, symmetric": ("gptq_v2", {"bits": 8, "sym": True, "desc_act": True}),
    "desc_act, one group": ("gptq", {"group_size": -1, "desc_act": True}),
}
"""A format, and arguments of Packer."""


@pytest.fixture
def packer(packed):
    """A function that makes the packer of a case."""
    return lambda name: packed.Packer(CASES[name][0], **CASES[name][1])


@pytest.fixture
def write(float_checkpoint, packed, tmp_path):
    """A function that writes a packed checkpoint; returns its folder and its values."""

    def write(packers, **fields):
        packers = packers if isinstance(packers, dict) else {PROJ: packers}
        config = next(each for each in packers.values() if each).config() | fields
        folder = tmp_path / "model"
        return folder, packed.write_packed(folder, float_checkpoint, packers, config)

    return write


def load_records(folder, **options):
    plan = plan_model(folder, **options)
    arithmetic = replace(
        plan.placement.arithmetic,
        quantized=lambda record: record,
        weight=Dense,
        head=Dense,
    )
    return replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()


def matrices(model):
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            weight, regions = module.weight, module.regions(name)
            is_record = isinstance(weight, nk.Quantized)
            values = weight.dense(torch.float32) if is_record else weight.values
            parts = values.split([len(region.rows) for region in regions])
            found |= {region.module: part for region, part in zip(regions, parts, strict=True)}
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_and_logits(write, packer, paged_runner, name, float_checkpoint, tmp_path):
    folder, expected = write(packer(name))
    model = load_records(folder, dtype="float32")
    found = matrices(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[module], values) for module, values in expected.items())
    num_bytes = sum(
        weight.num_bytes
        for module in model.modules()
        if isinstance(weight := getattr(module, "weight", None), nk.Quantized)
    )
    plan = plan_model(folder, dtype="float32")
    table = model.lm_head.head.values.nbytes
    whole = num_bytes + table + sum(each.nbytes for each in model.parameters())
    rounded = 0.01 if "desc_act" in name else 0  # parts of a stack share one order of columns
    assert whole <= plan.num_bytes <= whole * (1 + rounded)
    tensors = load_file(float_checkpoint / "model.safetensors")
    for module, values in expected.items():
        tensors[f"{module}.weight"] = values.contiguous()
    (tmp_path / "dense").mkdir()
    save_file(tensors, tmp_path / "dense" / "model.safetensors")
    (tmp_path / "dense" / "config.json").write_bytes(
        (float_checkpoint / "config.json").read_bytes()
    )
    logits = paged_runner(load_model(folder, dtype="float32")).step(PROMPT)
    wanted = paged_runner(load_model(tmp_path / "dense")).step(PROMPT)
    assert (logits - wanted).norm() < 1e-5 * wanted.norm()
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq_v2, 8 bits"])
def test_ranks_hold_slices(write, packer, name):
    folder, expected = write(packer(name))
    ranks = [
        matrices(load_records(folder, parallel=TensorParallel(rank, 2), dtype="float32"))
        for rank in (0, 1)
    ]
    for module, values in expected.items():
        by_columns = module.endswith(("o_proj", "down_proj"))
        parts = [rank[module] for rank in ranks]
        assert torch.equal(torch.cat(parts, 1 if by_columns else 0), values), module


def test_an_order_of_columns_needs_one_rank(write, packer):
    folder, _ = write(packer("desc_act"))
    with pytest.raises(ValueError, match=r"o_proj has an order of its columns \(desc_act\)"):
        load_model(folder, parallel=TensorParallel(0, 2))
    load_model(write_one_group(folder), parallel=TensorParallel(0, 2))


def write_one_group(folder):
    """The same with the groups of every column known to be one: desc_act changes nothing."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"group_size": -1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("qzeros", "scales")):
            tensors[name] = tensors[name][:1].contiguous()
        if name.endswith("g_idx"):
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_rules_for_modules(write, packed):
    eight, four = packed.Packer("gptq", 8, 64), packed.Packer("gptq", 4, 32)
    packers = {"0.mlp.down_proj": None, "1.mlp.down_proj": eight, "o_proj": eight, PROJ: four}
    dynamic = {
        r"-:model\.layers\.0\.mlp\.down_proj": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": 64},
        r".*o_proj": {"bits": 8, "group_size": 64},
    }
    folder, expected = write(packers, **four.config(), dynamic=dynamic)
    found = matrices(load_records(folder, dtype="float32"))
    left = "model.layers.0.mlp.down_proj"
    assert found.keys() - expected.keys() == {left}
    assert all(torch.equal(found[module], values) for module, values in expected.items())


def test_only_some_modules_of_a_block(write, packer):
    gptq = packer("gptq")
    packers = {f"mlp{PROJ}": None, "o_proj": gptq}
    inside = [["self_attn.o_proj"]]
    folder, expected = write(packers, **gptq.config(), modules_in_block_to_quantize=inside)
    found = matrices(load_records(folder, dtype="float32"))
    assert len(expected) == 2
    assert all(torch.equal(found[module], values) for module, values in expected.items())


def test_a_quantized_head(write, packer):
    gptq = packer("gptq")
    packers = {"lm_head": gptq, PROJ: gptq}
    folder, expected = write(packers, lm_head=True)
    model = load_records(folder, dtype="float32")
    assert torch.equal(model.lm_head.head.dense(torch.float32), expected["lm_head"])
    hidden = torch.randn(3, 128)
    wanted = hidden @ expected["lm_head"].T
    assert torch.allclose(model.lm_head.logits(hidden), wanted, atol=1e-5)
    parts = []
    for rank in (0, 1):
        head = load_records(folder, dtype="float32", parallel=TensorParallel(rank, 2)).lm_head
        parts.append(head.head.dense(torch.float32))
    assert torch.equal(torch.cat(parts), expected["lm_head"])


def test_config_in_a_file_of_its_own(write, packer):
    for name, file, fields in (
        ("gptq", "quantize_config.json", {}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
    ):
        folder, expected = write(packer(name))
        config = json.loads((folder / "config.json").read_text())
        own = config.pop("quantization_config")
        del own["quant_method"]
        if fields:
            own = fields | {"zero_point": True}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / file).write_text(json.dumps(own))
        found = matrices(load_records(folder, dtype="float32"))
        assert all(torch.equal(found[module], values) for module, values in expected.items())
        folder.rename(folder.with_name(name))


@pytest.mark.parametrize("name", ["awq", "gptq", "desc_act, 8 bits, symmetric"])
def test_dummy_weights(write, packer, paged_runner, name):
    folder, _ = write(packer(name))
    model = load_model(folder, load_format="dummy", dtype="float32")
    kinds = {type(each.weight) for each in model.modules() if isinstance(each, Linear)}
    assert all(issubclass(kind, nk.Weight) for kind in kinds)
    assert kinds != {Dense}
    logits = paged_runner(model).step(PROMPT)
    assert logits.isfinite().all()
    assert 0 < logits.std() < 100


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("awq", {"version": "gemv"}, "version of the AWQ checkpoint is 'gemv': only 'gemm' is"),
        ("awq", {"bits": 8}, "bits of the AWQ checkpoint is 8: only 4 is read; use a GPTQ"),
        ("awq", {"zero_point": False}, "zero_point of the AWQ checkpoint is False: only true"),
        ("gptq", {"bits": 4.0}, "bits of the GPTQ checkpoint is 4.0: only 4 and 8 are read"),
        ("gptq", {"bits": 3}, r"config\.json: bits of the GPTQ checkpoint is 3: only 4 and 8 are"),
        ("gptq", {"checkpoint_format": "marlin"}, "is 'marlin': only 'gptq' and 'gptq_v2' are"),
        ("gptq", {"is_marlin_format": True}, "format of the GPTQ checkpoint is 'marlin'"),
        ("gptq", {"pack_dtype": "int64"}, "pack_dtype of the GPTQ checkpoint is 'int64'"),
        ("gptq", {"dynamic": {".*": {"bits": 2}}}, "bits of the GPTQ checkpoint is 2: only 4"),
    ],
)
def test_variants_that_are_not_read_are_named(write, packer, name, fields, message):
    folder, _ = write(packer(name), **fields)
    with pytest.raises(NotImplementedError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("config", "file", "message"),
    [
        (None, "quantize_config.json", r"quantize_config\.json: bits of the GPTQ checkpoint is 3"),
        ({}, "quantize_config.json", r"quantize_config\.json: bits of the GPTQ checkpoint is 3"),
        (
            {"bits": 4},
            None,
            r"config\.json: the quantization_config {'bits': 4} has no quant_method",
        ),
    ],
)
def test_16_the_file_of_the_quantization_config_is_named(write, packer, config, file, message):
    folder, _ = write(packer("gptq"))
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(values))
    if file:
        (folder / file).write_text(json.dumps({"bits": 3}))
    with pytest.raises(NotImplementedError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gptq", {"group_size": 100}, "q_proj has 128 columns: they must be a multiple of 100"),
        ("gptq", {"group_size": "all"}, "group_size is 'all': it must be a positive integer"),
        ("gptq", {"lm_head": 1}, "lm_head is 1: it must be true or false"),
        ("gptq", {"modules_in_block_to_quantize": "mlp"}, "is 'mlp': it must be a list of lists"),
        ("awq", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ("gptq", {"dynamic": {"-:.*(q": {}}}, "dynamic has the regular expression '.*(q', which"),
        ("gptq", {"quant_method": None}, "quant_method of the quantization_config is None: it mus"),
        ("gptq", {"quant_method": ["gptq"]}, "quant_method of the quantization_config is ['gptq']"),
    ],
)
def test_fields_of_a_wrong_type_are_named(write, packer, name, fields, message):
    folder, _ = write(packer(name), **fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups.where(groups < 3, 2), "columns of the groups 0 to 2, and scales of"),
        (lambda groups: groups // 2, "columns of the groups 0 to "),
        (lambda groups: groups + 1, "columns of the groups 1 to "),
        (torch.zeros_like, "columns of the groups 0 to 0, and scales of "),
        (
            lambda groups: groups.clone().index_fill_(0, torch.tensor(0), 2**31 - 1),
            "columns of the groups 0 to 2147483647",
        ),
        (
            lambda groups: groups.clone().index_fill_(0, torch.tensor(0), -(2**31)),
            "columns of the groups -2147483648 to",
        ),
        (lambda groups: groups.clone().index_fill_(0, torch.arange(40), 1), "groups of "),
    ],
)
def test_16_groups_that_do_not_fit_the_scales_are_refused(write, packer, change, message):
    folder, _ = write(packer("desc_act"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.g_idx"
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"1\.mlp\.down_proj has {message}"):
        load_model(folder)


def test_groups_that_were_never_set_are_in_order(write, packer):
    """Some files without `desc_act` have zeros in all of `g_idx`."""
    folder, expected = write(packer("gptq"))
    tensors = load_file(folder / "model.safetensors")
    unset = {name: torch.zeros_like(each) for name, each in tensors.items() if "g_idx" in name}
    save_file(tensors | unset, folder / "model.safetensors")
    found = matrices(load_records(folder, dtype="float32"))
    assert all(torch.equal(found[module], values) for module, values in expected.items())


@pytest.mark.parametrize("name", ["awq", "gptq", "desc_act"])
@pytest.mark.parametrize("architecture", ["Phi3", "Glm4"])
def test_rows_of_fused_and_of_rotated_matrices(
    packed, packer, tiny_model, paged_runner, tmp_path, architecture, name
):
    """Phi-3 has q, k and v in one tensor; GLM-4 rotates neighbours, so rows change places."""
    floats, pack = tiny_model(architecture), packer(name)
    folder, dense = tmp_path / "model", tmp_path / "dense"
    expected = packed.write_packed(folder, floats, {PROJ: pack}, pack.config())
    dense.mkdir()
    (dense / "config.json").write_bytes((floats / "config.json").read_bytes())
    tensors = load_file(floats / "model.safetensors")
    tensors |= {f"{module}.weight": each.contiguous() for module, each in expected.items()}
    save_file(tensors, dense / "model.safetensors")
    model, plain = (load_records(each, dtype="float32") for each in (folder, dense))
    wanted = dict(plain.named_modules())
    linears = {n: each for n, each in model.named_modules() if isinstance(each, Linear)}
    assert len(linears) == 16
    for module, linear in linears.items():
        assert isinstance(linear.weight, nk.Grouped)
        assert torch.equal(linear.weight.dense(torch.float32), wanted[module].weight.values)
    logits = paged_runner(load_model(folder, dtype="float32")).step(PROMPT)
    wanted = paged_runner(load_model(dense, dtype="float32")).step(PROMPT)
    assert (logits - wanted).norm() < 1e-5 * wanted.norm()


@pytest.fixture
def packed_head(packed, float_checkpoint, tmp_path):
    """A GPTQ checkpoint whose lm_head is quantized too, and that has one for labels as well."""
    packer = packed.Packer("gptq")
    config = packer.config() | {"lm_head": True}
    ends = {PROJ: packer, "lm_head": packer}
    packed.write_packed(tmp_path / "m", float_checkpoint, ends, config)
    tokenizer = {"model": {"vocab": {"no": 5, "yes": 6}}}
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(tokenizer))
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["score.weight"] = torch.ones(2, 128)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    return tmp_path / "m"


@pytest.mark.parametrize("kind", ["embed", "classify"])
def test_a_model_that_pools_does_not_read_a_quantized_head(packed_head, kind):
    pooler = describe(packed_head, runner="pooling", convert=kind).pooler
    assert pooler.kind == kind
    assert load_model(packed_head, pooler=pooler).lm_head is None


def test_labels_of_a_quantized_head_are_refused_with_the_fix(packed_head):
    fields = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    asked = {"convert": "classify", "hf_overrides": fields}
    pooler = describe(packed_head, runner="pooling", **asked).pooler
    with pytest.raises(ValueError, match=r"lm_head is quantized, .* whose lm_head is in floats$"):
        plan_model(packed_head, pooler=pooler, hf_overrides=fields)
