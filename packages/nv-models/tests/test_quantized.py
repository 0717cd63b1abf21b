"""Quantized checkpoints: values as their own tools read them, logits as transformers computes them.

The folder quantized/ has the checkpoints, the scripts that wrote them, and what the tools read.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nv_kernels as nk
import pytest
import torch
from nv_kernels.linear.weight import Dense
from nv_models import TensorParallel, load_model, plan_model
from nv_models.layers.linear import Linear
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).with_name("quantized")
PROMPT = [(37 * i + 11) % 64 for i in range(24)]
EXACT = ("w4", "w4_asym", "w8", "w8_asym", "fp8_tensor", "fp8_block", "mixed")
ROUNDED = ("fp8_row", "int8")
"""In these a code of an input is at a tie, which the last bit of the input decides."""
NAMES = (*EXACT, *ROUNDED)
Q = "model.layers.0.self_attn.q_proj"


def load_records(folder: Path, **options: object):
    """A model whose weights are the records themselves, or plain floats, on every device."""
    plan = plan_model(folder, **options)
    arithmetic = replace(plan.placement.arithmetic, quantized=lambda record: record, weight=Dense)
    return replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()


def linears(model) -> Iterator[tuple[str, Linear]]:
    return ((name, each) for name, each in model.named_modules() if isinstance(each, Linear))


def matrices(model) -> dict[str, torch.Tensor]:
    """Each matrix of a rank in bf16, by its name in the checkpoint."""
    found = {}
    for name, module in linears(model):
        weight = module.weight
        is_record = isinstance(weight, nk.Quantized)
        values = weight.dense(torch.bfloat16) if is_record else weight.values
        regions = module.regions(name)
        sizes = [len(region.rows) for region in regions]
        for region, part in zip(regions, values.split(sizes), strict=True):
            found[region.module] = part
    return found


@pytest.fixture
def edited(tmp_path):
    """A function that copies a checkpoint, changes its tensors and its config, and returns it."""

    def edit(name, change=lambda tensors: None, *, scheme=None, **fields):
        folder = tmp_path / name
        shutil.copytree(FOLDER / name, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = scheme or config["quantization_config"] | fields
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return edit


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_compressed_tensors(name):
    found = matrices(load_records(FOLDER / name))
    expected = json.loads((FOLDER / name / "expected.json").read_text())["dense"]
    assert found.keys() == expected.keys()
    for module, values in found.items():
        bits = values.contiguous().view(torch.int16).numpy().tobytes()
        assert hashlib.sha256(bits).hexdigest() == expected[module], module


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(paged_runner, name):
    expected = load_file(FOLDER / name / "expected.safetensors")
    runner = paged_runner(load_model(FOLDER / name, dtype="float32"))
    logits = first = runner.step(PROMPT)
    greedy = []
    for _ in range(len(expected["greedy"])):
        greedy.append(int(logits[-1].argmax()))
        logits = runner.step(greedy[-1:])
    assert greedy == expected["greedy"].tolist()
    if name in EXACT:
        error = (first - expected["logits"]).norm() / expected["logits"].norm()
        assert error < 1e-5
    else:  # with inputs in floats the share is 0.02 to 0.07
        difference = first.log_softmax(-1) - expected["logits"].log_softmax(-1)
        assert (difference.abs() < 2e-3).float().mean() > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_planned_bytes_are_those_of_the_records(name):
    plan = plan_model(FOLDER / name)
    model = load_records(FOLDER / name)
    weights = [module.weight for _, module in linears(model)]
    found = sum(
        weight.num_bytes if isinstance(weight, nk.Quantized) else weight.values.nbytes
        for weight in weights
    )
    head = model.lm_head.vocab_size * model.lm_head.hidden_size * 2
    assert plan.num_bytes == found + head + sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("name", ["w4", "w8_asym", "fp8_tensor", "int8", "mixed"])
def test_ranks_hold_slices(name):
    whole = matrices(load_records(FOLDER / name))
    ranks = [
        matrices(load_records(FOLDER / name, parallel=TensorParallel(rank, 2))) for rank in (0, 1)
    ]
    for module, values in whole.items():
        parts = [rank[module] for rank in ranks]
        by_columns = module.endswith(("o_proj", "down_proj"))
        assert torch.equal(torch.cat(parts, 1 if by_columns else 0), values), module


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "w4_asym",
            rf"{FOLDER}/w4_asym: .*down_proj would be cut at 96 of its 192 columns: .* of 64",
        ),
        ("fp8_block", r"q_proj would be cut at 64 of its 128 rows: .* multiple of 128"),
    ],
)
def test_a_share_that_cuts_a_group_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        _ = plan_model(FOLDER / name, parallel=TensorParallel(0, 2)).num_bytes


def test_all_packed_tensors_that_do_not_fit_are_listed(edited):
    def change(tensors):
        del tensors[f"{Q}.weight_packed"]
        tensors[f"{Q}.weight_scale"] = torch.ones(128, 5)
        tensors[f"{Q}.weight_g_idx"] = torch.zeros(128, dtype=torch.int32)
        tensors[f"{Q}.weight_shape"] = torch.tensor([128.0, 128.0])

    with pytest.raises(ValueError, match="cannot be loaded") as raised:
        load_model(edited("w4", change))
    assert [line.strip() for line in str(raised.value).splitlines()[1:-1]] == [
        f"{Q}.weight_packed [128, 16] is missing",
        f"{Q}.weight_g_idx [128] is unexpected",
        f"{Q}.weight_scale has shape [128, 5], expected [128, 4]",
        f"{Q}.weight_shape is float32, expected int64",
    ]


def test_scales_of_zeros_are_noticed(edited):
    with pytest.warns(UserWarning, match=rf"all zeros, .* are {Q}\.weight_scale"):
        load_model(edited("w4", lambda tensors: tensors[f"{Q}.weight_scale"].zero_()))


def test_parts_that_disagree_are_dequantized_with_one_warning(edited):
    expected = matrices(load_records(FOLDER / "w4"))

    def change(tensors):
        for end in ("packed", "scale", "shape"):
            del tensors[f"{Q}.weight_{end}"]
        tensors[f"{Q}.weight"] = expected[Q].contiguous()

    folder = edited("w4", change, ignore=["lm_head", Q])
    match = r"dequantized, as floats of 0\.1 MiB, are \S+q_proj, \S+k_proj, \S+v_proj: .* kinds"
    with pytest.warns(UserWarning, match=match) as warned:
        found = matrices(load_records(folder))
    assert len(warned) == 1
    assert all(torch.equal(found[module], expected[module]) for module in expected)


def test_what_no_kernel_takes_is_dequantized_on_a_card(monkeypatch):
    """A card's op returns the record where it has no kernel; here a device of another type does."""
    monkeypatch.setattr("nv_kernels.Grouped.device", property(lambda _: torch.device("meta")))
    match = r"as floats of 0\.2 MiB, are .*: no kernel takes Grouped of \[256, 128\]"
    with pytest.warns(UserWarning, match=match):
        found = load_records(FOLDER / "w4")
    assert all(not isinstance(module.weight, nk.Quantized) for _, module in linears(found))


class TestOrderOfColumns:
    """actorder "group": groups of columns that do not lie together."""

    @staticmethod
    def change(tensors):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
        for name in [name for name in tensors if name.endswith("weight_packed")]:
            if tensors[name].shape[1] * 8 == 128:
                codes = tensors[name].view(torch.uint8)
                codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, order]
                packed = codes[:, ::2] | codes[:, 1::2] << 4
                tensors[name] = packed.contiguous().view(torch.int32)
            columns = tensors[name].shape[1] * 8
            groups = torch.arange(columns) // 32
            groups = groups[order] if columns == 128 else groups
            tensors[name.replace("packed", "g_idx")] = groups.int()
        return order

    @pytest.fixture
    def folder(self, edited):
        groups = json.loads((FOLDER / "w4" / "config.json").read_text())["quantization_config"][
            "config_groups"
        ]
        groups["group_0"]["weights"]["actorder"] = "group"
        return edited("w4", self.change, config_groups=groups)

    def test_columns_keep_their_scales(self, folder):
        order = self.change({})
        expected, found = matrices(load_records(FOLDER / "w4")), matrices(load_records(folder))
        for module, values in expected.items():
            wanted = values[:, order] if values.shape[1] == 128 else values
            assert torch.equal(found[module], wanted), module

    def test_several_ranks_are_refused(self, folder):
        with pytest.raises(ValueError, match=r"o_proj has an order of its columns .*_size=1"):
            _ = plan_model(folder, parallel=TensorParallel(0, 2)).num_bytes


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 1) for name in NAMES), ("w4", 2), ("fp8_tensor", 2)]
)
def test_dummy_weights_have_the_form_of_the_files(paged_runner, name, size):
    plan = plan_model(FOLDER / name, load_format="dummy", parallel=TensorParallel(size - 1, size))
    assert (
        plan.num_bytes
        == plan_model(FOLDER / name, parallel=TensorParallel(size - 1, size)).num_bytes
    )
    model = plan.load()
    if size == 1:
        logits = paged_runner(model).step(PROMPT)
        assert logits.isfinite().all()
        assert logits.std(0).min() > 0


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS}
TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"is quantized \(bitsandbytes\), which is not read; read",
        ),
        ({"kv_cache_scheme": {"num_bits": 4}}, 'num_bits = 4: only 8 .* kv_cache_dtype="fp8"'),
        ({"kv_cache_scheme": {"strategy": "attn_head"}}, "strategy = 'attn_head': only 'tensor'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config of the checkp"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config of the checkpoint"),
        ({"quantization_status": "frozen"}, "status is 'frozen'.* save_compressed=True"),
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized', .* use one of pack-"),
        ({"weights": {"num_bits": 4.0}}, r"num_bits is 4\.0 in a group .*: it must be one of 4, 8"),
        ({"weights": {"actorder": "zzz"}}, "actorder is 'zzz' in a group of the format pack-quan"),
        ({"weights": {"num_bits": 3}}, "num_bits is 3 in a group .*: it must be one of 4, 8; use"),
        ({"weights": {"type": "float"}}, "type is 'float' in a group of the format pack-quantized"),
        ({"weights": {"strategy": "tensor"}}, "strategy is 'tensor': .* 'group' and 'channel'"),
        ({"input_activations": TOKENS}, r"has input_activations \(W4A8\), .* use W4A16"),
        ({"output_activations": TOKENS}, "quantizes output_activations, which is not computed"),
        ({"format": "int-quantized"}, "strategy is 'group' .* only 'channel', 'tensor' and blocks"),
        (
            {
                "format": "float-quantized",
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {**TOKENS, "strategy": "tensor"},
            },
            "strategy 'tensor' with dynamic = True: read are 'token' and groups of 128",
        ),
    ],
)
def test_variants_that_are_not_read_are_named(edited, fields, message):
    group = {"format": "pack-quantized", **GROUP}
    for name in ("format", "weights", "input_activations", "output_activations"):
        if name in fields:
            value = fields.pop(name)
            group[name] = {**WEIGHTS, **value} if name == "weights" else value
    folder = edited("w4", config_groups={"group_0": group}, **fields)
    with pytest.raises(NotImplementedError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ignore": ["re:*q"]}, r"ignore has the regular expression '\*q', which is none"),
        ({"ignore": ["re:(.|[a-z])*!"]}, "ignore has .*, whose match could take for ever: write"),
        ({"targets": ["re:model.*("]}, r"config_groups\.group_0\.targets has the regular"),
        ({"targets": None}, r"config_groups\.group_0 has no targets: name its modules"),
        ({"config_groups": {}}, r"w4/config\.json: config_groups is empty: it must have a group"),
    ],
)
def test_16_fields_that_select_no_module_are_named(edited, fields, message):
    group = {"format": "pack-quantized", **GROUP}
    if "targets" in fields:
        group["targets"] = fields.pop("targets")
    folder = edited("w4", **{"config_groups": {"group_0": group}, **fields})
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_16_codes_of_a_dtype_that_is_not_read_are_named_once(edited):
    def change(tensors):
        tensors[f"{Q}.weight_packed"] = tensors[f"{Q}.weight_packed"].to(torch.int16)

    with pytest.raises(ValueError, match="cannot be loaded") as raised:
        load_model(edited("w4", change))
    (line,) = [line for line in str(raised.value).splitlines() if f"{Q}.weight_packed" in line]
    assert "is I16: read are" in line


class TestFp8:
    """quant_method "fp8": the same matrices under other names."""

    @staticmethod
    def renamed(**ends):
        """A change of the ends of tensors' names; the numbers of static scales become scalars."""

        def change(tensors):
            for name in list(tensors):
                module, _, end = name.rpartition(".")
                if end in ends:
                    tensors[f"{module}.{ends[end]}"] = tensors.pop(name)

        return change

    @pytest.mark.parametrize(
        ("name", "ends", "scheme"),
        [
            (
                "fp8_block",
                {"weight_scale": "weight_scale_inv"},
                {"weight_block_size": [128, 128], "fmt": "e4m3"},
            ),
            (
                "fp8_tensor",
                {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"},
                {"weight_block_size": None, "activation_scheme": "static"},
            ),
            ("fp8_tensor", {}, {"activation_scheme": "static", "ignored_layers": ["lm_head"]}),
        ],
    )
    def test_equals_compressed_tensors(self, edited, paged_runner, name, ends, scheme):
        folder = edited(name, self.renamed(**ends), scheme={"quant_method": "fp8", **scheme})
        expected, found = matrices(load_records(FOLDER / name)), matrices(load_records(folder))
        assert all(torch.equal(found[module], expected[module]) for module in expected)
        logits = paged_runner(load_model(folder, dtype="float32")).step(PROMPT)
        wanted = load_file(FOLDER / name / "expected.safetensors")["logits"]
        assert (logits - wanted).norm() < 1e-5 * wanted.norm()

    def test_a_dynamic_scale_of_a_tensor_quantizes_each_token(self, edited):
        def change(tensors):
            for name in [name for name in tensors if name.endswith("input_scale")]:
                del tensors[name]
            for name in [name for name in tensors if name.endswith("weight_scale")]:
                tensors[name] = tensors[name].reshape(())

        folder = edited("fp8_tensor", change, scheme={"quant_method": "fp8"})
        weights = [module.weight for _, module in linears(load_records(folder))]
        assert {weight.inputs for weight in weights} == {"token"}
        expected, found = (
            matrices(load_records(FOLDER / "fp8_tensor")),
            matrices(load_records(folder)),
        )
        assert all(torch.equal(found[module], expected[module]) for module in expected)

    def test_modules_in_floats(self, edited):
        expected = matrices(load_records(FOLDER / "fp8_block"))

        def change(tensors):
            self.renamed(weight_scale="weight_scale_inv")(tensors)
            for name in ("o_proj", "v_proj"):
                module = f"model.layers.0.self_attn.{name}"
                del tensors[f"{module}.weight_scale_inv"]
                tensors[f"{module}.weight"] = expected[module].contiguous()

        scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        ignored = ["model.layers.0.self_attn.o_proj", "v_proj"]
        folder = edited("fp8_block", change, scheme=scheme | {"modules_to_not_convert": ignored})
        with pytest.warns(UserWarning, match="dequantized, .* several kinds, Fp8, Tensor"):
            found = matrices(load_records(folder))
        assert all(torch.equal(found[module], expected[module]) for module in expected)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"weight_block_size": [64, 128]}, r"is \[64, 128\]: only \[128, 128\] is read; use"),
            ({"activation_scheme": "none"}, 'is \'none\': only "dynamic" and "static" are read'),
            (
                {"activation_scheme": "static", "weight_block_size": [128, 128]},
                'activation_scheme is "static" beside weight_block_size',
            ),
            ({"scale_fmt": "ue8m0"}, "scale_fmt of the fp8 checkpoint is 'ue8m0': only 'float'"),
            ({"fmt": "e5m2"}, "fmt of the fp8 checkpoint is 'e5m2': only 'e4m3' is read"),
        ],
    )
    def test_variants_that_are_not_read_are_named(self, edited, fields, message):
        folder = edited("fp8_block", scheme={"quant_method": "fp8", **fields})
        with pytest.raises(NotImplementedError, match=message):
            load_model(folder)

    def test_a_scale_of_inputs_must_be_positive(self, edited):
        folder = edited(
            "fp8_tensor", lambda tensors: tensors[f"{Q}.input_scale"].fill_(float("nan"))
        )
        with pytest.raises(ValueError, match=rf"the scale of {Q}'s inputs is nan: it must be pos"):
            load_model(folder)


KV_SCHEME = {
    "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
}  # fmt: skip


class TestScalesOfTheKVCache:
    @staticmethod
    def change(value):
        def change(tensors):
            attention = "model.layers.0.self_attn"
            tensors[f"{attention}.k_scale"] = torch.tensor([0.25], dtype=torch.bfloat16)
            tensors[f"{attention}.v_scale"] = torch.tensor(value, dtype=torch.bfloat16)

        return change

    def test_they_are_read(self, edited):
        folder = edited("w4", self.change([0.5]), kv_cache_scheme=KV_SCHEME)
        model = load_model(folder)
        assert model.kv_scales() == [(0.25, 0.5)]
        assert load_model(FOLDER / "w4").kv_scales() == [(1.0, 1.0)]
        assert load_model(folder, load_format="dummy").kv_scales() == [(1.0, 1.0)]
        assert load_model(folder, parallel=TensorParallel(1, 2)).kv_scales() == [(0.25, 0.5)]

    def test_a_number_without_a_dimension(self, edited):
        folder = edited("w4", self.change(0.5), kv_cache_scheme=KV_SCHEME)
        assert load_model(folder).kv_scales() == [(0.25, 0.5)]

    def test_it_must_be_positive(self, edited):
        folder = edited("w4", self.change([-1.0]), kv_cache_scheme=KV_SCHEME)
        with pytest.raises(ValueError, match=r"self_attn\.v_scale is -1\.0: it must be positive"):
            load_model(folder)

    def test_one_that_lacks_is_listed(self, edited):
        folder = edited("w4", kv_cache_scheme=KV_SCHEME)
        with pytest.raises(ValueError, match=r"0\.self_attn\.k_scale \[1\] is missing"):
            load_model(folder)
