"""Every architecture against transformers, on tiny random weights with all features in use."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from nv_models import load_model, plan_model, read_config
from nv_models.architectures import ARCHITECTURES
from nv_models.config import Factors, Gated, Mixture, NormKind
from safetensors.torch import load_file, save_file

NAMES = [name.removesuffix("ForCausalLM") for name in ARCHITECTURES]
STEPS = 32


def close(logits, expected):
    """Whether logits are equal up to 2e-4 of the largest one's size."""
    return (logits - expected).abs().max() <= 2e-4 * expected.abs().max()


def greedy(runner, logits):
    """The ids of STEPS greedy steps, and the logits that they came from."""
    ids, found = [], [logits[-1:]]
    for _ in range(STEPS):
        ids.append(int(found[-1].argmax()))
        found.append(runner.step(ids[-1:]))
    return ids, torch.cat(found)


def test_every_architecture_has_a_case(tiny_models):
    assert set(tiny_models.CASES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(tiny_model, tiny_models, paged_runner, name):
    folder, prompt = tiny_model(name), tiny_models.PROMPT
    model = load_model(folder)
    runner = paged_runner(model)
    first = runner.step(prompt)
    ids, after = greedy(runner, first)
    expected = tiny_models.transformers_logits(folder, prompt + ids)
    assert expected.std() > 0.5  # wide enough to mean something
    assert close(torch.cat((first[:-1], after)), expected)
    assert ids == expected[len(prompt) - 1 : -1].argmax(1).tolist()

    chunked = paged_runner(model)
    parts = [chunked.step(prompt[:7]), chunked.step(prompt[7:40]), chunked.step(prompt[40:])]
    assert close(torch.cat(parts), first)
    assert greedy(chunked, parts[-1])[0] == ids


def variants(config):
    """The config with one feature after the other turned off, by the feature's name."""
    factors, rope = config.factors, next(iter(config.ropes), None)

    def layers(change):
        return replace(config, layers=tuple(map(change, config.layers)))

    def attention(**changes):
        return layers(lambda layer: replace(layer, attention=replace(layer.attention, **changes)))

    def experts(**changes):
        return layers(
            lambda layer: replace(layer, feed_forward=replace(layer.feed_forward, **changes))
            if isinstance(layer.feed_forward, Mixture) else layer
        )  # fmt: skip

    def gate(**changes):
        return layers(
            lambda layer: replace(layer, feed_forward=replace(
                layer.feed_forward, gate=replace(layer.feed_forward.gate, **changes)))
            if isinstance(layer.feed_forward, Mixture) else layer
        )  # fmt: skip

    off = {
        "window": attention(window=None),
        "softcap": attention(softcap=None),
        "scale": attention(scale=config.head_dim**-0.5),
        "rope of a layer": layers(lambda layer: replace(layer, rope=rope)),
        "part of the head": layers(
            lambda layer: replace(
                layer, rope=layer.rope and replace(layer.rope, rope_type="default",
                                                   partial_rotary_factor=1.0)
            )
        ),
        "pairs": replace(config, rotates_neighbours=False),
        "activation": layers(
            lambda layer: replace(layer, feed_forward=Gated(layer.feed_forward.width,
                                                            layer.feed_forward.bias))
            if isinstance(layer.feed_forward, Gated) else layer
        ),
        "sum of the experts' weights": experts(is_normalised=False),
        "experts per token": experts(top_k=1),
        "steepness of the gate": gate(alpha=1.0),
        "limit of the gate": gate(limit=None),
        "shift of the gate": gate(shift=0.0),
        "offset of norms": replace(config, norm_kind=NormKind(config.norm_kind.in_fp32)),
        "factors": replace(config, factors=Factors(logit_softcap=factors.logit_softcap)),
        "embedding": replace(config, factors=replace(factors, embedding=1.0)),
        "residual": replace(config, factors=replace(factors, residual=1.0)),
        "logits": replace(config, factors=replace(factors, logits=1.0)),
        "logit softcap": replace(config, factors=replace(factors, logit_softcap=None)),
    }  # fmt: skip
    return {name: changed for name, changed in off.items() if changed != config}


EXPECTED = {
    "Qwen2": {"window"},
    "Mistral": {"window"},
    "Ministral": {"window"},
    "Phi3": {"window", "part of the head"},
    "SmolLM3": {"window", "rope of a layer"},
    "Granite": {"scale", "factors", "embedding", "residual", "logits"},
    "Olmo3": {"window", "rope of a layer", "part of the head"},
    "Gemma2": {
        "window", "softcap", "scale", "activation", "offset of norms", "factors", "embedding",
        "logit softcap",
    },
    "Gemma3": {
        "window", "scale", "activation", "offset of norms", "factors", "embedding",
        "rope of a layer", "part of the head",
    },
    "Glm4": {"pairs", "part of the head"},
    "Exaone4": {"window", "rope of a layer"},
    "Qwen3Moe": {"sum of the experts' weights", "experts per token"},
    "Mixtral": {"window", "sum of the experts' weights", "experts per token"},
    "GptOss": {
        "window", "part of the head", "sum of the experts' weights", "experts per token",
        "steepness of the gate", "limit of the gate", "shift of the gate",
    },
}  # fmt: skip
"""The features of which each architecture must notice the absence."""


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_that_is_turned_off_is_noticed(
    tiny_model, tiny_models, paged_runner, monkeypatch, name
):
    plan = plan_model(tiny_model(name))
    expected = tiny_models.transformers_logits(tiny_model(name), tiny_models.PROMPT)
    changed = variants(plan.config)
    assert set(changed) == EXPECTED.get(name, set())
    for feature, config in changed.items():
        logits = paged_runner(replace(plan, config=config).load()).step(tiny_models.PROMPT)
        assert not close(logits, expected), feature
    if plan.config.norms.after_attention:
        monkeypatch.setattr("nv_kernels.norm_pending", lambda stream, _: stream)
        assert not close(paged_runner(plan.load()).step(tiny_models.PROMPT), expected)


def kinds_of(model):
    """The vectors of a loaded model by the ends of their names: norms, biases, sinks."""
    kinds = {}
    for name, values in model.named_parameters():
        if values.ndim == 1:
            kinds.setdefault(re.sub(r".*layers\.\d+\.", "", name), []).append(values)
    return kinds


def neutral(kind, offset):
    """The value with which a vector changes nothing."""
    if kind.endswith("sinks"):
        return -1e4
    return 1 - offset if "norm" in kind and kind.endswith("weight") else 0.0


@pytest.mark.parametrize("name", NAMES)
def test_each_kind_of_vector_is_noticed(tiny_model, tiny_models, paged_runner, name):
    """Norms, biases and sinks of a tiny checkpoint change its logits, so that no test hides one."""
    model, prompt = load_model(tiny_model(name)), tiny_models.PROMPT
    expected = paged_runner(model).step(prompt)
    kinds = kinds_of(model)
    norms = {kind for kind in kinds if "norm" in kind}
    assert len(norms) >= 3
    for kind, vectors in kinds.items():
        before = [values.detach().clone() for values in vectors]
        for values in vectors:
            values.data.fill_(neutral(kind, model.config.norm_kind.offset))
        found = paged_runner(model).step(prompt)
        for values, own in zip(vectors, before, strict=True):
            values.data.copy_(own)
        assert not close(found, expected), kind
    assert torch.equal(paged_runner(model).step(prompt), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_and_a_wrong_tensor_are_named(tiny_model, tmp_path, name):
    folder = shutil.copytree(tiny_model(name), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    *_, missing, wrong = sorted(key for key in tensors if ".2." in key)
    del tensors[missing]
    tensors[wrong] = tensors[wrong][:-1].contiguous()
    tensors["model.layers.2.extra.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_model(folder)
    assert f"{missing} " in str(error.value)
    assert f"{wrong} has shape" in str(error.value)
    assert "model.layers.2.extra.weight [3] is unexpected" in str(error.value)


OLDER = {
    "Gemma3": [
        {
            "rope_local_base_freq": 20000.0,
            "rope_theta": 2000000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
            "sliding_window": 512,
            "hidden_act": "gelu_pytorch_tanh",
        }
    ],
    "Phi3": [
        {
            "rope_scaling": {
                "type": "su",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 8192,
            "original_max_position_embeddings": 4096,
            "sliding_window": 2047,
        }
    ],
    "SmolLM3": [{"no_rope_layer_interval": 3}],
    "Mistral": [{"sliding_window": None}],
    "Exaone4": [
        {"sliding_window": None, "layer_types": ["full_attention"] * 8},
        {
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
        },
    ],
}
"""Fields as checkpoints written by version 4 of transformers have them."""
FORMS = [(name, (32, None), {}) for name in NAMES]
FORMS += [(name, (4, 2), fields) for name in NAMES for fields in OLDER.get(name, [{}])]
NAMED = {"Gemma3": "gemma3_text", "Qwen3Moe": "qwen3_moe", "GptOss": "gpt_oss"}
SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8}


@pytest.mark.parametrize(("name", "heads", "fields"), FORMS)
def test_a_config_is_read_as_transformers_reads_it(tmp_path, name, heads, fields):
    """With all but the sizes missing, the defaults are those of the config class."""
    model_type = NAMED.get(name, name.lower())
    raw = {"architectures": [f"{name}ForCausalLM"], "model_type": model_type, **SMALL}
    raw["num_attention_heads"] = heads[0]
    if heads[1] and name != "OPT":
        raw |= {"num_key_value_heads": heads[1], **fields}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = read_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    head_dim = getattr(theirs, "head_dim", None) or 64 // theirs.num_attention_heads
    assert (ours.num_q_heads, ours.num_kv_heads, ours.head_dim) == (
        theirs.num_attention_heads, getattr(theirs, "num_key_value_heads", heads[0]), head_dim,
    )  # fmt: skip
    assert ours.rms_norm_eps == getattr(theirs, "rms_norm_eps", 1e-5)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    ends = theirs.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    assert list(ours.eos_token_ids) == [end for end in ends if end < 320]
    window = getattr(theirs, "sliding_window", None)
    kinds = (
        getattr(theirs, "layer_types", None)
        or ["sliding_attention" if window and name in {"Mistral", "Phi3"} else "full_attention"] * 8
    )
    assert [layer.attention.window for layer in ours.layers] == [
        window if kind == "sliding_attention" else None for kind in kinds
    ]
    for layer, kind in zip(ours.layers, kinds, strict=True):
        rope = getattr(theirs, "rope_parameters", {})
        rope = rope.get(kind, rope)
        if layer.rope:
            assert layer.rope.rope_theta == rope["rope_theta"]
            assert layer.rope.partial_rotary_factor == rope.get("partial_rotary_factor", 1.0)
            assert layer.rope.rope_type == rope["rope_type"]
            assert layer.rope.factor == rope.get("factor") or name == "Phi3"
    assert ours.qkv_bias == getattr(theirs, "attention_bias", name in {"Qwen2", "OPT"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_norm_elementwise_affine", False),
        ("_remove_final_layer_norm", True),
        ("word_embed_proj_dim", [64]),
        ("num_key_value_heads", 2),
        ("activation_function", "gelu"),
    ],
)
def test_another_opt_is_refused(tiny_model, field, value):
    with pytest.raises(
        ValueError, match=f"hf_overrides: {field}.* is .*; |{field}.* ('gelu' is not|posi)"
    ):
        read_config(tiny_model("OPT"), {field: value})


@pytest.mark.parametrize("field", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_16_a_softcap_is_a_positive_number(tiny_model, field):
    folder = tiny_model("Gemma2")
    config = read_config(folder, {field: 10**30})
    caps = (config.layers[0].attention.softcap, config.factors.logit_softcap)
    assert [cap for cap in caps if cap == 1e30] == [1e30]
    assert all(isinstance(cap, float) for cap in caps)
    for value in (0, -1, "30"):
        with pytest.raises(ValueError, match=f"{field} is {value!r}: it must be a positive num"):
            read_config(folder, {field: value})


def test_opt_350m_has_norms_after_and_a_narrow_embedding(tiny_models, tiny_post_norm, paged_runner):
    model, prompt = load_model(tiny_post_norm), tiny_models.PROMPT
    assert (model.config.embedding_size, model.model["decoder"].final_layer_norm) == (32, None)
    runner = paged_runner(model)
    first = runner.step(prompt)
    ids, after = greedy(runner, first)
    expected = tiny_models.transformers_logits(tiny_post_norm, prompt + ids)
    assert expected.std() > 0.5
    assert close(torch.cat((first[:-1], after)), expected)
    assert ids == expected[len(prompt) - 1 : -1].argmax(1).tolist()
    chunked = paged_runner(model)
    assert close(torch.cat([chunked.step(prompt[:7]), chunked.step(prompt[7:])]), first)
    with pytest.raises(ValueError, match=r"project_in.weight \[64, 32\] is missing"):
        load_model(without(tiny_post_norm, "model.decoder.project_in.weight"))


def without(folder, name):
    """The folder, without a tensor."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_pattern_of_layers_is_a_number_or_letters(tiny_model):
    folder = tiny_model("Exaone4")
    expected = read_config(folder, {"sliding_window_pattern": 3, "layer_types": None})
    changes = {"sliding_window_pattern": "LLG", "layer_types": None}
    assert read_config(folder, changes) == expected
    with pytest.raises(ValueError, match="sliding_window_pattern is 'GLLL': it must be a positive"):
        read_config(folder, {"sliding_window_pattern": "GLLL"})
