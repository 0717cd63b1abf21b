"""Parts of a checkpoint that are not computed: without effect, or refused by name."""

import json
import math

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from nv_models import RopeConfig, load_model, read_config, resolve
from nv_models.architectures import ARCHITECTURES
from safetensors.torch import load_file, save_file

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
PLAIN = RopeConfig(1e4, original_max_position_embeddings=256)
SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def gguf(tiny_checkpoint, write_gguf, tmp_path, monkeypatch):
    """A function that writes a tiny Llama as GGUF, with metadata, and returns its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(metadata=None, change=None, kind="llama", **options):
        folder = tiny_checkpoint(kind)
        if change:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors")
        write_gguf(folder, tmp_path / "m.gguf", Kind.F16, metadata=metadata, **options)
        return tmp_path / "m.gguf"

    return write


@pytest.fixture
def config(tmp_path):
    """A function that reads a config.json with further keys."""

    def read(**keys):
        values = {"architectures": ["LlamaForCausalLM"], **SIZES, **keys}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_config(tmp_path)

    return read


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.factor": 4.0}, RopeConfig(1e4, "linear", 4.0, 256)),
        ({"rope.scale_linear": 4.0}, RopeConfig(1e4, "linear", 4.0, 256)),
        (
            {"rope.scaling.type": "linear", "rope.scale_linear": 4.0},
            RopeConfig(1e4, "linear", 4.0, 256),
        ),
        (
            {"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0},
            RopeConfig(1e4, "linear", 2.0, 256),
        ),
        ({"rope.scaling.factor": 0.0}, PLAIN),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, PLAIN),
        (
            YARN,
            RopeConfig(1e4, "yarn", 4.0, 64, attention_factor=0.1 * math.log(4) + 1),
        ),
        (
            YARN | {"rope.scaling.attn_factor": 2.0},
            RopeConfig(1e4, "yarn", 4.0, 64, attention_factor=2 * (0.1 * math.log(4) + 1)),
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},  # context_length is 256
            RopeConfig(1e4, "yarn", 4.0, 256, attention_factor=0.1 * math.log(4) + 1),
        ),
    ],
)
def test_b12_rope_scaling_of_gguf_is_read_as_llama_cpp_reads_it(gguf, metadata, expected):
    assert read_config(resolve(gguf(metadata))).ropes[0] == expected


@pytest.mark.parametrize(
    "metadata",
    [
        {"rope.scaling.finetuned": True},
        {"rope.scaling.yarn_beta_fast": 16.0},
        {"rope.dimension_count": 64},
        {"attention.value_length": 64},
        {"attention.scale": 0.125},
        {"attention.causal": True},
        {"attention.clamp_kqv": 0.0},
        {"attention.sliding_window": 0},
        {"logit_scale": 1.0},
        {"expert_count": 0},
        {"vocab_size": 320},
        {"tensor_data_layout": "Meta AI original pth"},
    ],
)
def test_b12_keys_of_gguf_that_change_nothing(gguf, metadata):
    assert read_config(resolve(gguf(metadata))).ropes[0] == PLAIN


@pytest.mark.parametrize(
    "metadata",
    [
        {"rope.dimension_count": 32},
        {"rope.dimension_sections": [16, 24, 24]},
        {"rope.freq_base_swa": 1e6},
        {"rope.scaling.alpha": 1000.0},
        {"rope.scaling.attn_factor": 1.5},
        {"rope.scaling.of_tomorrow": 3},
        {"attention.value_length": 32},
        {"attention.scale": 0.5},
        {"attention.causal": False},
        {"attention.clamp_kqv": 8.0},
        {"attention.max_alibi_bias": 8.0},
        {"attention.sliding_window": 64},
        {"attention.temperature_scale": 0.1},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"logit_scale": 0.0625},
        {"residual_scale": 0.22},
        {"embedding_scale": 12.0},
        {"expert_used_count": 2},
        {"use_parallel_residual": True},
    ],
)
def test_b12_keys_of_gguf_that_are_not_computed_are_refused_by_name(gguf, metadata):
    (key,) = metadata
    with pytest.raises(ValueError, match=rf"llama\.{key} is .* not supported"):
        resolve(gguf(metadata))


def test_b12_experts_of_gguf_without_their_tensors(gguf):
    """A file of llama that counts experts is Mixtral's, which has no dense feed-forward tensors."""
    with pytest.raises(
        ValueError, match=r"m\.gguf holds blk\.0\.ffn_down\.weight.*not supported by"
    ):
        resolve(gguf({"expert_count": 8}))


def test_b12_a_rope_scaled_twice(gguf):
    factors = torch.ones(32).numpy()
    assert read_config(resolve(gguf(rope_factors=factors))).ropes[0].factor == 1
    with pytest.raises(ValueError, match=r"twice, by rope_freqs.weight and by .*factor 4,"):
        resolve(gguf({"rope.scaling.factor": 4.0}, rope_factors=factors))


def test_rope_factors_of_another_size(gguf):
    with pytest.raises(
        ValueError,
        match=r"rope_freqs.weight has shape .*16.* and type 0: it must be 32 values of fp32",
    ):
        resolve(gguf(rope_factors=torch.ones(16).numpy()))


def test_biases_of_gguf(gguf, tiny_checkpoint, paged_runner):
    names = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
    sizes = {"q": 256, "k": 128, "v": 128, "o": 128, "gate": 192, "up": 192, "down": 128}

    def add(*kept):
        def change(tensors):
            for layer in (0, 1):
                for part, inner in ((p, i) for p, some in names.items() for i in some if i in kept):
                    name = f"model.layers.{layer}.{part}.{inner}_proj.bias"
                    tensors[name] = torch.randn(sizes[inner])

        return change

    model = load_model(gguf(change=add("gate", "up", "down")))
    assert model.config.layers[0].feed_forward.bias
    assert not model.config.qkv_bias
    with pytest.raises(ValueError, match=r"biases at attn_q, .* none at attn_output, .* not supp"):
        resolve(gguf(change=add("q", "k", "v")))
    with pytest.raises(ValueError, match=r"biases at ffn_up and none at ffn_gate, ffn_down"):
        resolve(gguf(change=add("up")))


def test_names_of_one_architecture_do_not_become_those_of_the_next():
    from nv_models.checkpoint.gguf.tensors import names_of  # noqa: PLC0415

    for row in ARCHITECTURES.values():
        names_of(row)
    assert "ffn_gate_exps" not in names_of(ARCHITECTURES["LlamaForCausalLM"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_exps.weight"], "mixture of experts"),
        (["blk.0.attn_qkv.weight"], r"holds blk.0.attn_qkv.weight, which is not supported"),
        (["blk.0.attn_norm.bias"], r"holds blk.0.attn_norm.bias, which"),
        (["rope_factors_long.weight"], r"holds rope_factors_long.weight, which"),
        ([f"blk.{i}.attn_q_norm.weight" for i in range(5)], r"and 2 more, which is not"),
    ],
)
def test_tensors_of_gguf_that_have_no_place(write_header, tmp_path, monkeypatch, names, message):
    from nv_models.checkpoint.gguf.header import Header, TensorInfo  # noqa: PLC0415
    from nv_models.checkpoint.gguf.metadata import biased_groups, known_layers  # noqa: PLC0415
    from nv_models.checkpoint.gguf.support import refuse_tensors  # noqa: PLC0415

    info = TensorInfo((4, 4), 0, 0, tmp_path)
    header = Header(
        tmp_path,
        {"general.architecture": "llama"},
        dict.fromkeys(["token_embd.weight", "blk.1.attn_q.bias", *names], info),
    )
    row = ARCHITECTURES["LlamaForCausalLM"]
    with pytest.raises(ValueError, match=message):
        refuse_tensors(header, known_layers(row), biased_groups(row))


@pytest.mark.parametrize(
    "keys",
    [
        {"attention_multiplier": 0.5},
        {"logit_scale": 0.0625},
        {"logits_scaling": 8.0},
        {"residual_multiplier": 0.22},
        {"attn_logit_softcapping": 50.0},
        {"query_pre_attn_scalar": 256},
        {"rope_interleaved": True},
        {"rotary_pct": 0.25},
        {"scale_emb": 12},
        {"num_local_experts": 8},
        {"qkv_bias": True},
        {"is_causal": False},
    ],
)
def test_b12_keys_of_config_json_that_are_not_computed_are_refused_by_name(config, keys):
    ((key, value),) = keys.items()
    with pytest.raises(
        ValueError, match=rf"config\.json: {key} is {value}, which is not supported"
    ):
        config(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_activation": "gelu"},
        {"mlp_act": "relu"},
        {"attention_chunk_size": 8192},
        {"no_rope_layer_interval": 4},
        {"attn_temperature_tuning": True},
        {"attention_sinks": True},
        {"rms_norm_add_unit_offset": True},
        {"post_norm": True},
        {"use_qk_norm": True},
        {"qk_norm": True},
        {"lm_head_bias": True},
        {"is_encoder_decoder": True},
    ],
)
def test_f6_keys_of_other_architectures_are_refused_by_name(config, keys):
    ((key, value),) = keys.items()
    with pytest.raises(
        ValueError, match=rf"config\.json: {key} is {value!r}, which is not supported"
    ):
        config(**keys)
    for neutral in (None, False, 0):
        assert config(**{key: neutral}) == config()


def test_f6_what_the_architecture_computes_may_be_named(config):
    assert config(hidden_activation="silu", mlp_act="silu") == config()
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4}
    assert config(**qwen3, qk_norm=True, use_qk_norm=True) == config(**qwen3)


@pytest.mark.parametrize(
    "keys",
    [
        {"attention_multiplier": 32**-0.5},
        {"logits_scaling": 1.0},
        {"final_logit_softcapping": None},
        {"rope_interleaved": False},
        {"query_pre_attn_scalar": 32},
        {"is_causal": True},
        {"num_experts": 0},
        {"pretraining_tp": 2},
        {"initializer_scale": 0.5},
        {"a_note_of_the_authors": "x"},
    ],
)
def test_b12_keys_of_config_json_that_change_nothing(config, keys):
    assert config(**keys) == config()


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"factor": 4.0}, "factor 4.0"),
        ({"rope_type": "default", "factor": 4.0}, "factor 4.0"),
        ({"rope_type": "linear", "factor": 4.0, "attention_factor": 1.2}, "attention_factor 1.2"),
        ({"rope_type": "dynamic", "factor": 4.0, "alpha": 1000.0}, "alpha 1000.0"),
        ({"rope_type": "yarn", "factor": 4.0, "long_factor": [1.0]}, r"long_factor \[1.0\]"),
        ({"rope_type": "default", "mrope_section": [8, 12]}, r"mrope_section \[8, 12\]"),
    ],
)
def test_b12_parameters_that_a_kind_of_rope_does_not_read(config, rope, key):
    with pytest.raises(ValueError, match=f"{key} of the rope is not supported where its rope_type"):
        config(rope_scaling=rope)


def test_b12_parameters_of_a_rope_that_change_nothing(config):
    neutral = {"factor": 1.0, "attention_factor": 1.0, "beta_fast": 32, "finetuned": True}
    assert config(rope_scaling={"type": "default", **neutral}).ropes[0] == RopeConfig(
        1e4, factor=1.0, attention_factor=1.0, beta_fast=32, original_max_position_embeddings=2048
    )


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 5120),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 8192),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 400,
                }
            },
            1600,
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 2048),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
            2048,
        ),
    ],
)
def test_b13_the_length_that_a_scaled_rope_gives(config, keys, length):
    assert config(**keys).max_length == length
    assert config(**keys).max_position_embeddings == 2048


def test_b13_the_table_reaches_the_stretched_length(gguf):
    model = load_model(gguf({"rope.scaling.factor": 4.0}))
    assert len(model.model.cos_sin[model.config.ropes[0]]) == model.config.max_length == 1024
    model = load_model(gguf(YARN), max_positions=300)
    assert len(model.model.cos_sin[model.config.ropes[0]]) == model.config.max_length == 256


@pytest.mark.parametrize("key", ["general.description", "general.name", "llama.note"])
def test_a_text_that_is_not_utf_8_and_does_not_matter(write_header, tmp_path, key):
    from nv_models.checkpoint.gguf.header import read_header  # noqa: PLC0415
    from nv_models.checkpoint.gguf.section import Section  # noqa: PLC0415

    write_header(tmp_path / "m.gguf", "llama", {key: "abcd"})
    data = (tmp_path / "m.gguf").read_bytes().replace(b"abcd", b"a\xff\xfed")
    (tmp_path / "m.gguf").write_bytes(data)
    header = read_header(tmp_path / "m.gguf")
    section, _, name = key.rpartition(".")
    with pytest.raises(ValueError, match=f"{key} is 'a.*d': it must be a string of UTF-8"):
        Section(header, section).text(name)
