"""GPT-OSS: tensors that only it has, and its experts in MXFP4, against transformers."""

import json
import shutil

import nv_kernels as nk
import pytest
import torch
from nv_models import TensorParallel, load_model, plan_model, read_config
from nv_models.checkpoint import mxfp4
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

STACK = "model.layers.2.mlp.experts.gate_up_proj"


@pytest.fixture
def edited(tiny_model, tmp_path):
    """A function that changes a copy of the checkpoint's tensors."""

    def edit(change):
        folder = shutil.copytree(tiny_model("GptOss"), tmp_path / "edited", dirs_exist_ok=True)
        tensors = load_file(tiny_model("GptOss") / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return edit


@pytest.mark.parametrize(
    ("name", "value"),
    [("sinks", -1e4), *((f"{part}.bias", 0.0) for part in ("q_proj", "k_proj", "v_proj", "o_proj",
     "router")), ("gate_up_proj_bias", 0.0), ("down_proj_bias", 0.0)],
)  # fmt: skip
def test_each_bias_and_the_sinks_are_noticed(
    edited, tiny_model, tiny_models, paged_runner, name, value
):
    def switch_off(tensors):
        for each in (found := [key for key in tensors if key.endswith(name)]):
            tensors[each].fill_(value)
        assert len(found) == 4

    expected = paged_runner(load_model(tiny_model("GptOss"))).step(tiny_models.PROMPT)
    found = paged_runner(load_model(edited(switch_off))).step(tiny_models.PROMPT)
    assert (found - expected).abs().max() > 2e-3 * expected.abs().max()


def test_a_missing_and_a_wrong_stack_are_named(edited):
    def damage(tensors):
        del tensors[STACK]
        tensors[f"{STACK}_bias"] = tensors[f"{STACK}_bias"][:-1].contiguous()

    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_model(edited(damage))
    assert f"{STACK} [8, 64, 192] is missing" in str(error.value)
    assert f"{STACK}_bias has shape [7, 192], expected [8, 192]" in str(error.value)


def test_the_config_of_the_published_files(tiny_model):
    """Fields as openai/gpt-oss-20b has them."""
    fields = {
        "head_dim": 64, "num_key_value_heads": 8, "num_attention_heads": 64,
        "rope_parameters": None, "rope_theta": 150000, "swiglu_limit": 7.0, "dtype": None,
        "initial_context_length": 4096, "experts_per_token": 4, "max_position_embeddings": 131072,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }  # fmt: skip
    config = read_config(tiny_model("GptOss"), fields)
    assert config.max_length == 131072
    assert config.layers[0].feed_forward.gate == nk.Gate(1.702, 7.0, 1.0)
    assert [layer.attention.window for layer in config.layers] == [16, None, 16, None]
    assert config.layers[0].rope.truncate is False
    other = {**fields, "quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(NotImplementedError, match=r"quantized \(hqq\)"):
        read_config(tiny_model("GptOss"), other)
    with pytest.raises(NotImplementedError, match=r"quantized \(mxfp4\)"):
        read_config(tiny_model("Mixtral"), {"quantization_config": {"quant_method": "mxfp4"}})


@pytest.fixture(scope="module")
def packed(tiny_model, tmp_path_factory):
    """Two folders: with experts in MXFP4, and with what transformers makes of them; in bf16."""
    folders = [tmp_path_factory.mktemp("mxfp4") / name for name in ("packed", "plain")]
    source, generator = tiny_model("GptOss"), torch.Generator().manual_seed(3)
    kept = {name: each.bfloat16() for name, each in load_file(source / "model.safetensors").items()}
    sizes = {name: each.shape for name, each in kept.items() if name.endswith("_proj")}
    plain, stored = dict(kept), {name: each for name, each in kept.items() if name not in sizes}
    for name, (experts, columns, rows) in sizes.items():
        shape = (experts, rows, columns // 32, 16)
        blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, shape[:3], dtype=torch.uint8, generator=generator)
        scales[0, 0, 0] = 0
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    values = json.loads((source / "config.json").read_text())
    del values["dtype"]
    for folder, tensors in zip(folders, (stored, plain), strict=True):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(values))
        values["quantization_config"] = {"quant_method": "mxfp4"}
    return folders


def weights(model):
    """All tensors of a loaded model."""
    experts = [layer.mlp.experts.experts for layer in model.model.layers]
    stacks = [getattr(each, name) for each in experts
              for name in ("gate_up", "down", "gate_up_bias", "down_bias")]  # fmt: skip
    return [*model.parameters(), *stacks]


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("dtype", ["auto", torch.float32])
def test_mxfp4_is_what_transformers_makes_of_it(packed, rank, dtype):
    """Also the part of a rank, whose 48 columns end within a block."""
    parallel = TensorParallel() if rank is None else TensorParallel(rank, 2)
    models = [load_model(folder, parallel=parallel, dtype=dtype) for folder in packed]
    assert models[0].config.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
    for ours, theirs in zip(*map(weights, models), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_mxfp4_of_one_matrix_at_a_time(packed, monkeypatch):
    seen = []
    usual = mxfp4.dequantize
    monkeypatch.setattr(
        mxfp4, "dequantize", lambda *packed: [seen.append(packed[0].shape), usual(*packed)][1]
    )
    load_model(packed[0])
    assert sorted(set(seen)) == [(64, 3, 16), (192, 2, 16)]
    assert len(seen) == 4 * 2 * 8


def test_mxfp4_that_does_not_fit_is_named(packed, tmp_path):
    folder = shutil.copytree(packed[0], tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    del tensors["model.layers.1.mlp.experts.down_proj_blocks"]
    tensors[f"{STACK}_scales"] = tensors[f"{STACK}_scales"][:-1].contiguous()
    tensors["model.layers.3.mlp.experts.down_proj_scales"] = torch.zeros(8, 64, 3)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].byte()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_model(folder)
    for sentence in (
        "layers.0.mlp.experts.down_proj_scales is missing beside model.layers.0.mlp.experts.down",
        "layers.1.mlp.experts.down_proj_blocks is missing beside model.layers.1.mlp.experts.down",
        f"{STACK}_blocks has shape [8, 192, 2, 16] and {STACK}_scales [7, 192, 2]: they must be",
        "layers.3.mlp.experts.down_proj_scales in ",
        "is F32: read are U8",
        "model.norm.weight is uint8, expected plain floats",
    ):
        assert sentence in str(error.value)


def test_an_mxfp4_matrix_of_another_size_is_named(packed):
    plan = plan_model(packed[0], hf_overrides={"intermediate_size": 64})
    with pytest.raises(ValueError, match=f"{STACK}_blocks has shape .8, 64, 192., expected .8, 64"):
        plan.load()
