"""GPT-OSS: tensors that only it has, and its experts in MXFP4, against transformers."""

import json
import shutil
from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from nv_models import TensorParallel, load_model, plan_model, read_config, resolve
from nv_models.checkpoint import mxfp4
from nv_models.checkpoint.gguf import tensors as reader
from nv_models.rope import cos_sin_table
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


KEYS = {
    "attention.sliding_window": 16, "expert_feed_forward_length": 96, "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
}  # fmt: skip
KINDS = {"exp": Kind.MXFP4, "": Kind.Q8_0}
"""As published: experts in MXFP4, and the other matrices in another type."""


class TestGGUF:
    @pytest.fixture(autouse=True)
    def _own_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    @pytest.fixture
    def both(self, tiny_model, write_gguf, tmp_path):
        """A GGUF file, and a folder of safetensors with the values that the gguf library reads."""
        folder = shutil.copytree(tiny_model("GptOss"), tmp_path / "folder")
        kept = write_gguf(folder, tmp_path / "m.gguf", KINDS, metadata=KEYS)
        save_file(kept, folder / "model.safetensors")
        return tmp_path / "m.gguf", folder

    def test_equals_the_dequantized_checkpoint(self, both, tiny_models, paged_runner):
        found, expected = (load_model(each, dtype="float32") for each in both)
        ours, theirs = (paged_runner(each).step(tiny_models.PROMPT) for each in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        truth = tiny_models.transformers_logits(both[1], tiny_models.PROMPT)
        assert (ours - truth).abs().max() <= 2e-4 * truth.abs().max()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_reads_its_part(self, both, rank):
        parallel = TensorParallel(rank, 2)
        models = [load_model(each, parallel=parallel, dtype="bfloat16") for each in both]
        for ours, theirs in zip(*(model.model.layers for model in models), strict=True):
            for name, values in vars(theirs.mlp.experts.experts).items():
                if isinstance(values, torch.Tensor):
                    assert torch.equal(getattr(ours.mlp.experts.experts, name), values), name
            assert torch.equal(ours.self_attn.sinks, theirs.self_attn.sinks)
            assert torch.equal(ours.mlp.gate.bias, theirs.mlp.gate.bias)

    def test_the_config_is_that_of_the_folder(self, both):
        found, expected = read_config(resolve(both[0])), read_config(both[1])
        for ours, theirs in zip(found.layers, expected.layers, strict=True):
            assert ours.attention == theirs.attention
            torch.testing.assert_close(
                *(cos_sin_table(each.rope, 32, 256) for each in (ours, theirs))
            )
            assert ours.feed_forward == replace(theirs.feed_forward, names=ours.feed_forward.names)

    def test_an_expert_s_matrix_at_a_time(self, both, monkeypatch):
        seen = []
        usual = mxfp4.values_of_bytes
        monkeypatch.setattr(
            mxfp4,
            "values_of_bytes",
            lambda *packed: [seen.append(packed[0].shape), usual(*packed)][1],
        )
        load_model(both[0], dtype="bfloat16")
        assert sorted(set(seen)) == [(64, 3, 16), (96, 2, 16)]
        assert len(seen) == 4 * 3 * 8

    @pytest.mark.parametrize(
        ("own", "name"),
        [
            ("ffn_up_exps.bias", "mlp.experts.7.up_proj.bias [96]"),
            ("ffn_down_exps.weight", "mlp.experts.0.down_proj.weight [64, 96]"),
            ("attn_sinks.weight", "self_attn.sinks [4]"),
        ],
    )
    def test_a_missing_tensor_is_named(self, both, monkeypatch, own, name):
        usual = reader.by_expert
        monkeypatch.setattr(
            reader,
            "by_expert",
            lambda each, *rest: () if each == f"blk.2.{own}" else usual(each, *rest),
        )
        with pytest.raises(ValueError, match="cannot be loaded") as error:
            load_model(both[0])
        assert f"model.layers.2.{name} is missing" in str(error.value)

    def test_biases_that_only_some_experts_have_are_refused(
        self, tiny_model, write_gguf, monkeypatch, tmp_path
    ):
        usual = GGUFWriter.add_tensor
        monkeypatch.setattr(
            GGUFWriter,
            "add_tensor",
            lambda self, name, *data, **more: (
                name.endswith("up_exps.bias") or usual(self, name, *data, **more)
            ),
        )
        write_gguf(tiny_model("GptOss"), tmp_path / "m.gguf", Kind.F16, metadata=KEYS)
        with pytest.raises(ValueError, match=r"has biases at .* and none at ffn_up_exps"):
            resolve(tmp_path / "m.gguf")
