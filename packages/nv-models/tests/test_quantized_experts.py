"""Quantized experts: their values are those of the format, dequantized while they load."""

import warnings

import pytest
import torch
from nv_kernels.linear.weight import Dense
from nv_models import TensorParallel, load_model, plan_model
from nv_models.layers.experts import ExpertMLPs
from nv_models.layers.linear import ColumnLinear
from safetensors.torch import load_file, save_file

MOE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
"""Each rank of two has whole blocks of 128 rows and columns."""
PROMPT = [(37 * i + 11) % 320 for i in range(40)]


class Fp8Blocks:
    """Qwen3's and DeepSeek's fp8."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def matrix(self, rows, columns):
        codes = torch.randn(rows, columns, generator=self.generator) * 30
        codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
        size = -(-rows // 128), -(-columns // 128)
        scale = torch.rand(size, generator=self.generator) * 0.004 + 0.001
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide

    def config(self):
        skipped = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
        return {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": skipped,
        }


class Packed4:
    """compressed-tensors' W4A16 in groups of 32."""

    def __init__(self, along):
        self.generator = torch.Generator().manual_seed(0)
        self.along = along

    def matrix(self, rows, columns):
        q = torch.randint(0, 16, (rows, columns), generator=self.generator)
        scale = torch.rand(rows, columns // 32, generator=self.generator) * 0.02 + 0.005
        scale = scale.bfloat16()
        tensors = {
            "weight_packed": self.along(q, 1, list(range(0, 32, 4))),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        return tensors, (q - 8).float() * scale.float().repeat_interleave(32, 1)

    def config(self):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
        group = {"targets": ["Linear"], "format": "pack-quantized", "weights": weights}
        return {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        }


@pytest.fixture
def packers(packed):
    """Each format's maker of matrices, and fields that keep the routers in floats."""
    return {
        "fp8": (Fp8Blocks(), {}),
        "W4A16": (Packed4(packed.along), {}),
        "AWQ": (packed.Packer("awq"), {"modules_to_not_convert": ["mlp.gate"]}),
        "GPTQ": (packed.Packer("gptq", 8), {"dynamic": {r"-:.*mlp\.gate$": {}}}),
    }


NAMES = ("fp8", "W4A16", "AWQ", "GPTQ")


@pytest.fixture
def write(tiny_checkpoint, packed, packers, tmp_path):
    """A function that writes a checkpoint of a format; returns it, and its values in floats."""

    def write(name):
        source = tiny_checkpoint("qwen3_moe", **MOE)
        packer, fields = packers[name]
        config = packer.config() | fields
        values = packed.write_packed(tmp_path / name, source, {"_proj": packer}, config)
        tensors = load_file(source / "model.safetensors")
        tensors |= {f"{module}.weight": each.contiguous() for module, each in values.items()}
        save_file(tensors, source / "model.safetensors")
        return tmp_path / name, source

    return write


def experts(model):
    return [module.experts for module in model.modules() if isinstance(module, ExpertMLPs)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [None, 1])
def test_values_are_those_of_the_format(write, name, rank):
    folder, source = write(name)
    parallel = TensorParallel() if rank is None else TensorParallel(rank, 2)
    expected = experts(load_model(source, dtype="float32", parallel=parallel))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(folder, dtype="float32", parallel=parallel)
    assert len(expected) == 2
    for ours, theirs in zip(experts(model), expected, strict=True):
        assert torch.equal(ours.gate_up, theirs.gate_up)
        assert torch.equal(ours.down, theirs.down)
    attention = [each for each in model.modules() if isinstance(each, ColumnLinear)]
    assert len(attention) == 2
    assert not any(isinstance(each.weight, Dense) for each in attention)


@pytest.mark.parametrize("name", ["W4A16", "AWQ", "GPTQ"])
def test_logits_are_those_of_the_values(write, paged_runner, name):
    folder, source = write(name)
    with pytest.warns(UserWarning, match="experts have no product of codes"):
        model = load_model(folder, dtype="float32")
    logits = paged_runner(model).step(PROMPT)
    wanted = paged_runner(load_model(source, dtype="float32")).step(PROMPT)
    assert (logits - wanted).norm() < 1e-4 * wanted.norm()


def test_one_warning_names_them_and_their_bytes(write):
    folder, _ = write("W4A16")
    size = 2 * 3 * 4 * 256 * 128 * 2 / 2**20  # 2 layers of 3 matrices of 4 experts, in bf16
    match = rf"as floats of {size:.1f} MiB, are model\.layers\.0\.mlp\.experts, model\.layers\.1"
    with pytest.warns(UserWarning, match=match) as warned:
        load_model(folder, dtype="bfloat16")
    assert len(warned) == 1


def test_planned_bytes_have_experts_as_floats(write):
    folder, source = write("AWQ")
    plan, floats = (plan_model(each, dtype="bfloat16") for each in (folder, source))
    saved = floats.num_bytes - plan.num_bytes
    attention = 2 * 128 * (4 + 4 + 4 + 4) * 64  # values in two layers
    assert 1.3 * attention < saved < 1.5 * attention  # of 2 bytes, 0.5 and scales are left


def test_all_tensors_that_do_not_fit_are_listed(write):
    folder, _ = write("fp8")
    tensors = load_file(folder / "model.safetensors")
    scale = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    del tensors[scale]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{scale} \[2, 1\] is missing"):
        load_model(folder)


@pytest.mark.parametrize("name", NAMES)
def test_dummy_weights(write, paged_runner, name):
    folder, _ = write(name)
    with pytest.warns(UserWarning, match="random weights: dequantized"):
        model = load_model(folder, dtype="float32", load_format="dummy")
    logits = paged_runner(model).step(PROMPT)
    assert logits.isfinite().all()
    assert logits.std(0).min() > 0
    for each in experts(model):
        assert 0.005 < each.gate_up.std() < 0.1


def test_stacks_of_codes_are_refused(tiny_model):
    scheme = {"quant_method": "fp8", "modules_to_not_convert": ["router"]}
    with pytest.raises(NotImplementedError, match=r"0\.mlp\.experts are quantized \(fp8\), which"):
        load_model(tiny_model("GptOss"), hf_overrides={"quantization_config": scheme})
