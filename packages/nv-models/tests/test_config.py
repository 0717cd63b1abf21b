"""Configs against transformers' own reading of the same config.json, and its refusals."""

import importlib
import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from nv_models import (
    RopeConfig,
    TensorParallel,
    cos_sin_table,
    describe,
    plan_model,
    read_config,
)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}
YARN = {"type": "yarn", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPES = {
    "nothing": {},
    "theta": {"rope_theta": 5e5},
    "v5": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "null scaling": {"rope_theta": 1e6, "rope_scaling": None},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_theta": 1e6, "rope_scaling": YARN, "max_position_embeddings": 512},
    "yarn trained on less": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "rope_theta": 1e6,
        },
        "max_position_embeddings": 131072,
    },
    "yarn, every knob": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "truncate": False,
            "rope_theta": 1e5,
        },
    },
    "yarn, attention factor": {
        "rope_scaling": {**YARN, "attention_factor": 1.5},
        "rope_theta": 1e4,
    },
    "yarn, a range past the last dimension": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "rope_theta": 10.0,
        },
        "max_position_embeddings": 4096,
    },
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3, "max_position_embeddings": 131072},
}


def write(folder, kind="qwen3", generation=None, **overrides):
    names = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
    config = {"model_type": kind, "architectures": [names[kind]], **SIZES, **overrides}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("rope", ROPES)
def test_equals_transformers(tmp_path, kind, rope):
    write(tmp_path, kind, **ROPES[rope])
    ours = read_config(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.qkv_bias == ours.output_bias == theirs.attention_bias
    assert ours.layers[0].feed_forward.bias == getattr(theirs, "mlp_bias", False)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.dtype is theirs.dtype is None

    class_name = {"qwen3": "Qwen3", "llama": "Llama"}[kind]
    module = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["x"])
    rotary = getattr(module, f"{class_name}RotaryEmbedding")(theirs)
    positions = torch.arange(0, ours.max_position_embeddings, 997)
    cos, sin = rotary(torch.empty(0), positions[None])  # [1, T, D], both halves alike
    half = ours.head_dim // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    table = cos_sin_table(ours.ropes[0], ours.head_dim, ours.max_position_embeddings)
    assert table.shape == (ours.max_position_embeddings, ours.head_dim)
    torch.testing.assert_close(table[positions], expected, atol=0, rtol=0)


def test_spellings_agree(tmp_path):
    for name, rope in (
        ("old", {"rope_theta": 1e6, "rope_scaling": YARN}),
        ("new", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}),
        ("by layer type", {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 1e6}}}),
    ):
        (tmp_path / name).mkdir()
        config = read_config(write(tmp_path / name, **rope))
        assert config.ropes[0] == RopeConfig(
            1e6, "yarn", factor=4.0, original_max_position_embeddings=32768
        ), name


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype(tmp_path, key):
    assert read_config(write(tmp_path, **{key: "bfloat16"})).dtype == torch.bfloat16


def test_eos_ids_of_both_files_and_generation_defaults(tmp_path):
    generation = {"eos_token_id": [7, 9], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    generation |= {"max_new_tokens": 99, "do_sample": True, "repetition_penalty": None}
    config = read_config(write(tmp_path, "llama", generation, eos_token_id=9))
    assert config.eos_token_ids == (9, 7)
    assert config.generation.temperature == 0.6
    assert config.generation.top_k == 20
    assert config.generation.top_p == 0.95
    assert config.generation.min_p is config.generation.repetition_penalty is None
    assert config.generation.max_new_tokens == 99


def test_class_default_eos_only_where_no_file_names_one(tmp_path):
    assert read_config(write(tmp_path, "llama")).eos_token_ids == (2,)
    write(tmp_path, "llama", {"eos_token_id": 5})
    assert read_config(tmp_path).eos_token_ids == (5,)


def test_an_eos_id_that_no_logit_has_is_dropped(tmp_path):
    write(tmp_path, "llama", {"eos_token_id": [319, 320, 9999]}, eos_token_id=7)
    with pytest.warns(UserWarning, match=r"eos_token_id .*320, 9999.* 0 \.\. 319") as warned:
        plan = plan_model(tmp_path, load_format="dummy")
    assert plan.config.eos_token_ids == read_config(tmp_path).eos_token_ids == (7, 319)
    assert str(tmp_path / "generation_config.json") in str(warned[0].message)
    write(
        tmp_path, "llama", {}, eos_token_id=320
    )  # the class's default is also past the vocabulary
    with pytest.warns(UserWarning, match=r"config\.json: eos_token_id .*320"):
        assert plan_model(tmp_path, load_format="dummy").config.eos_token_ids == ()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        read_config(tmp_path)  # a load reads the file more than once, and plans once
        plan_model(tmp_path, load_format="dummy")
        plan_model(tmp_path, load_format="dummy", parallel=TensorParallel(1, 2))
    assert len(warned) == 1


def test_16_what_generation_config_recommends_and_nothing_follows(tmp_path):
    unread = {"suppress_tokens": [5], "no_repeat_ngram_size": 3}
    write(tmp_path, generation={"num_beams": 1, **unread})
    with pytest.warns(UserWarning, match=r"recommends no_repeat_ngram_size 3, suppress_tokens \[5"):
        plan_model(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "supported are Qwen3ForCausalLM, LlamaForCausal"),
        ({"architectures": None}, "none named"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "'linear_attention', which is not",
        ),
        (
            {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"]},
            "layer_types has 1 entries: it must have num_hidden_layers = 2",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000: it must be at most 2048"),
        ({"head_dim": 10**9}, "head_dim is 1000000000: it must be at most 65536"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide': it must be a positive integer"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "short_factor of the rope has 0 en",
        ),
        (
            {"rope_scaling": {"rope_type": "xpos"}},
            "rope_type 'xpos' is not supported; supported are default, linear",
        ),
        (
            {"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}},
            r"rope_type \['yarn'\] is not s",
        ),
        ({"rope_scaling": {"type": {}, "factor": 2.0}}, r"rope_type {} is not supported"),
        (
            {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 1}},
            "original_max_position_embeddings of the rope is 1: it must be more than 1 where",
        ),
        (
            {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
            "long_factor of the rope has 1 entries: it must have 64",
        ),
        (
            {"rope_scaling": LONGROPE | {"short_factor": [1.0]}},
            "short_factor of the rope has 1 entries: it must have 64",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"num_attention_heads": True},
            "num_attention_heads is True: it must be a positive integer",
        ),
        (
            {"architectures": "Qwen3ForCausalLM"},
            "architectures is 'Qwen3F.*': it must be a list of strings",
        ),
        ({"layer_types": 5}, "layer_types is 5: it must be a list of strings"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small': it must be a positive number"),
        ({"rms_norm_eps": 1e300}, r"rms_norm_eps is 1e\+300: it must be at most 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': it must be true or false"),
        ({"eos_token_id": "a"}, "eos_token_id is 'a': it must be a token id or a list of them"),
        ({"eos_token_id": -1}, "eos_token_id is -1: it must be an integer from 0 to 2147483647"),
        ({"quantization_config": 5}, "quantization_config is 5: it must be an object"),
        ({"rope_parameters": 5}, "rope_parameters is 5: it must be an object"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1: it must be a positive number"),
        (
            {"rope_scaling": {"type": "linear"}},
            "factor of the rope is None: it must be a positive .*'linear'",
        ),
        ({"rope_scaling": YARN | {"factor": "x"}}, "factor is 'x': it must be a number"),
        ({"head_dim": 15}, "head_dim is 15: it must be even"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000*: it must be a positive number"),
        (
            {"max_position_embeddings": 10**400},
            "max_position_embeddings is 1000*: it must be at most 2147483647",
        ),
        (
            {"rope_scaling": YARN | {"factor": 0}},
            "factor of the rope is 0: it must be a positive .*'yarn'",
        ),
    ],
)
def test_refusals_name_the_file(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message) as error:
        read_config(write(tmp_path, **overrides))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_16_json_that_is_nested_too_deeply(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ValueError, match=r"config.json is nested too deeply: download it again"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"top_k": True}, "top_k is True: it must be a number"),
        ({"top_p": math.nan}, "top_p is nan: it must be a finite number"),
        (
            {"eos_token_id": [1, 2.5]},
            r"eos_token_id is \[1, 2.5\]: it must be a token id or a list of them",
        ),
        (
            {"eos_token_id": [5, -2]},
            "eos_token_id is -2: it must be an integer from 0 to 2147483647",
        ),
        (
            {"eos_token_id": 10**30},
            f"eos_token_id is {10**30}: it must be an integer from 0 to 2147483647",
        ),
    ],
)
def test_refusals_of_generation_config_name_that_file(tmp_path, generation, message):
    with pytest.raises(ValueError, match=message) as error:
        read_config(write(tmp_path, generation=generation))
    assert str(error.value).startswith(f"{tmp_path / 'generation_config.json'}: ")


LINEAR = {"type": "linear", "factor": 2.0}
FINITE = ": it must be a finite number"
RANGE = ": it must be a number from 1e-06 to 1000000"


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (LINEAR | {"factor": math.inf}, f"factor is inf{FINITE}"),
        (LINEAR | {"factor": math.nan}, f"factor is nan{FINITE}"),
        (LINEAR | {"factor": 10**400}, f"factor is 1000*{FINITE}"),
        (LINEAR | {"factor": 1e300}, rf"factor of the rope is 1e\+300{RANGE}"),
        (LINEAR | {"factor": 1e-300}, f"factor of the rope is 1e-300{RANGE}"),
        (
            LINEAR | {"rope_theta": 1e300},
            r"rope_theta of the rope is 1e\+300: it must be a number from 1e-06 to 1e\+15",
        ),
        (YARN | {"mscale": math.nan}, f"mscale is nan{FINITE}"),
        (YARN | {"mscale": -1.0}, f"mscale of the rope is -1.0{RANGE}"),
        (YARN | {"attention_factor": math.inf}, f"attention_factor is inf{FINITE}"),
        (YARN | {"attention_factor": 0.0}, f"attention_factor of the rope is 0.0{RANGE}"),
        (LLAMA3 | {"low_freq_factor": math.inf}, f"low_freq_factor is inf{FINITE}"),
        (
            LLAMA3 | {"original_max_position_embeddings": 1e300},
            r"original_max_position_embeddings of the rope is 1e\+300: .* from 1 to 2147483647",
        ),
    ],
)
def test_f5_a_number_of_the_rope_that_makes_no_sense(tmp_path, rope, message):
    with pytest.raises(ValueError, match=message) as error:
        read_config(write(tmp_path, rope_scaling=rope))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert len(str(error.value)) < 600


def test_f7_a_long_list_of_ids_is_cut(tmp_path):
    write(tmp_path, "llama", eos_token_id=[2, *range(320, 5000)])
    with pytest.warns(UserWarning, match=r"names 320, 321, 322, and 4677 more, but"):
        assert plan_model(tmp_path, load_format="dummy").config.eos_token_ids == (2,)


def test_f9_files_may_begin_with_a_byte_order_mark(tmp_path):
    write(tmp_path, "llama", {"temperature": 0.5}, eos_token_id=7)
    expected = read_config(tmp_path)
    for name in ("config.json", "generation_config.json"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_config(tmp_path) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"use_sliding_window": True, "max_window_layers": 0}, "sliding_window = 4096 is active"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention', which"),
    ],
)
def test_a_window_of_an_architecture_without_them_is_refused(tmp_path, overrides, message):
    write(tmp_path, "llama", **overrides)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_sliding_window_that_reaches_no_layer_is_fine(tmp_path):
    write(tmp_path, use_sliding_window=True, sliding_window=64, max_window_layers=28)
    assert read_config(tmp_path).num_layers == 2
    write(tmp_path, use_sliding_window=False, sliding_window=64, max_window_layers=0)
    assert read_config(tmp_path).num_layers == 2


def test_another_quantization_is_refused(tmp_path):
    write(tmp_path, quantization_config={"quant_method": "hqq", "bits": 4})
    with pytest.raises(
        NotImplementedError, match=r"quantized \(hqq\), .* read are awq, compressed"
    ):
        read_config(tmp_path)


def test_files_that_are_not_there_or_not_json(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="is a JSON list: it must be an object"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "torch.float8_e5m2", "int8"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_f6_a_dtype_that_only_quantized_weights_have(tmp_path, key, name):
    with pytest.raises(NotImplementedError, match=f"{key} is {name}, in which no model is"):
        read_config(write(tmp_path, **{key: name}))


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_rope_without_its_parameters(kind):
    with pytest.raises(ValueError, match="factor"):
        cos_sin_table(RopeConfig(1e4, kind, original_max_position_embeddings=64), 64, 8)


def test_b03_the_tokenizers_eos_is_one_more_end(tiny_checkpoint, tmp_path):
    config = json.loads((tiny_checkpoint("llama") / "config.json").read_text())

    def ends(eos, *tokenizer_eos):
        values = {k: v for k, v in config.items() if k != "eos_token_id"} | eos
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_config(tmp_path).ends(tokenizer_eos)

    assert ends({"eos_token_id": [7, 5]}, 5, 9) == (7, 5, 9)
    assert ends({"eos_token_id": 7}) == (7,)
    assert ends({"eos_token_id": None}, 9) == (9,)
    assert ends({}) == (2,)  # Llama's default
    assert ends({}, 9) == (9,)
    with pytest.raises(ValueError, match="the tokenizer's EOS has the id 999, but the vocabulary"):
        ends({}, 999)


def test_a_plan_parses_each_file_once(tmp_path, monkeypatch):
    write(tmp_path, "llama", {"eos_token_id": 5})
    parsed = []

    def counted(file):
        parsed.append(file.name)
        return json.loads(file.read_text())

    module = importlib.import_module("nv_models.read_config")  # the package has its function
    monkeypatch.setattr(module, "read_json", counted)
    plan_model(tmp_path, load_format="dummy")
    described = describe(tmp_path, {"max_position_embeddings": 64}, runner="pooling")
    assert parsed == ["config.json", "generation_config.json"] * 2
    plan = plan_model(tmp_path, load_format="dummy", files=described.files)
    assert plan.config.max_position_embeddings == 64
    assert len(parsed) == 4


@pytest.mark.parametrize(
    ("kinds", "number"),
    [("a", 1), ("aaaa", 2), ("abab", 3), ("aabaab", 4), ("abbb", 3), ("abcd", 4)],
)
def test_the_first_layers_that_launch_every_kernel(tmp_path, kinds, number):
    """Each pair of neighbours is among them: `aab` and the `a` after it hold all of `aabaab`."""
    write(tmp_path)
    config = read_config(tmp_path)
    thetas = {kind: RopeConfig(float(ord(kind))) for kind in set(kinds)}
    layers = tuple(replace(config.layers[0], rope=thetas[kind]) for kind in kinds)
    assert replace(config, layers=layers).num_trial_layers == number


@pytest.mark.parametrize("name", ["generation_config.json", "quantize_config.json"])
def test_16_a_dead_link_is_no_missing_file(tmp_path, name):
    write(tmp_path)
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(FileNotFoundError, match=rf"{name} links to .*gone, which is gone \(a prun"):
        read_config(tmp_path)
