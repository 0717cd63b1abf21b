"""Pooling as a model's files describe it, and the heads, against transformers' own classes."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from nv_models import describe, plan_model
from nv_models.pooling.pooler_config import Activation, Pooling
from safetensors.torch import load_file, save_file
from torch import nn

EMBED, CLASSIFY = ("embed", "token_embed"), ("classify", "token_classify")
SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
         "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """A function that saves a tiny model of one of transformers' classes."""

    def save(name: str, **fields: object) -> Path:
        torch.manual_seed(3)
        config = transformers.Qwen3Config if "Qwen3" in name else transformers.LlamaConfig
        model = getattr(transformers, name)(config(**SIZES | fields))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3)
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def folder(tmp_path):
    """A function that writes config.json of a class, and other files."""

    def write(name: str = "Qwen3Model", files: dict | None = None, **fields: object) -> Path:
        config = {"architectures": [name], **SIZES, **fields}
        for file, content in {"config.json": config, **(files or {})}.items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(json.dumps(content))
        return tmp_path

    return write


def read(path: Path, runner: str = "auto", convert: str = "auto", task: str = "auto"):
    return describe(path, runner=runner, convert=convert, task=task).pooler


def modules(*kinds: str, package: str = "sentence_transformers.models.") -> list[dict]:
    listed = enumerate(("Transformer", *kinds))
    return [{"type": package + kind, "path": f"{i}_{kind}" if i else ""} for i, kind in listed]


@pytest.mark.parametrize(
    ("name", "options", "kind", "tasks"),
    [
        ("Qwen3ForCausalLM", {}, None, ()),
        ("Qwen3ForCausalLM", {"runner": "pooling"}, "embed", EMBED),
        ("Qwen3ForCausalLM", {"task": "embed"}, "embed", EMBED),
        ("Qwen3ForCausalLM", {"convert": "classify"}, "classify", CLASSIFY),
        ("LlamaModel", {}, "embed", EMBED),
        ("LlamaForSequenceClassification", {}, "classify", CLASSIFY),
        ("LlamaForSequenceClassification", {"task": "score"}, "classify", CLASSIFY),
        ("LlamaForSequenceClassification", {"convert": "embed"}, "embed", EMBED),
        ("Qwen3ForTokenClassification", {}, "classify", ("token_classify",)),
    ],
)
def test_options_and_class_decide(folder, name, options, kind, tasks):
    pooler = read(folder(name), **options)
    assert (pooler and pooler.kind, pooler.tasks if pooler else ()) == (kind, tasks)


@pytest.mark.parametrize(
    ("fields", "activation", "num_labels"),
    [
        ({}, Activation.SOFTMAX, 2),
        ({"num_labels": 1}, Activation.SIGMOID, 1),
        ({"id2label": {"0": "x", "1": "y", "2": "z"}}, Activation.SOFTMAX, 3),
        ({"problem_type": "single_label_classification"}, Activation.SOFTMAX, 2),
        ({"problem_type": "multi_label_classification"}, Activation.SIGMOID, 2),
        ({"problem_type": "regression", "num_labels": 1}, Activation.NONE, 1),
    ],
)
def test_problem_types(folder, fields, activation, num_labels):
    pooler = read(folder("Qwen3ForSequenceClassification", **fields))
    assert (pooler.activation, pooler.num_labels) == (activation, num_labels)
    assert ("score" in pooler.tasks) == (num_labels == 1)


@pytest.mark.parametrize(
    ("values", "pooling"),
    [
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST),
        ({"pooling_mode_cls_token": True}, Pooling.CLS),
        ({}, Pooling.MEAN),
    ],
)
@pytest.mark.parametrize("package", ["sentence_transformers.models.", "a.b.modules.", ""])
def test_both_spellings_of_a_folder_of_sentence_transformers(folder, values, pooling, package):
    named = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": None}
    files = {
        "modules.json": modules("Pooling", "Normalize", package=package),
        "1_Pooling/config.json": values,
        "config_sentence_transformers.json": named,
    }
    pooler = read(folder("Qwen3ForCausalLM", files))
    assert (pooler.kind, pooler.pooling, pooler.activates) == ("embed", pooling, True)
    assert pooler.prompts == (("query", "Q: "), ("document", ""))
    files["modules.json"] = modules("Pooling", package=package)
    assert not read(folder("Qwen3ForCausalLM", files)).activates


@pytest.mark.parametrize("name", ["Q", "query", "document", None])
def test_the_default_prompt_is_one_of_the_file_s_or_an_empty_one(folder, name):
    """Both names without a prompt in the file are empty ones, as in sentence-transformers."""
    named = {"prompts": {"Q": "Q: "}, "default_prompt_name": name}
    files = {"modules.json": modules("Pooling"), "1_Pooling/config.json": {}}
    pooler = read(folder("Qwen3Model", files | {"config_sentence_transformers.json": named}))
    assert (pooler.prompts, pooler.default_prompt) == ((("Q", "Q: "),), name)


@pytest.mark.parametrize("name", ["passage", "", ["Q"], {}, 0, False])
@pytest.mark.parametrize(("prompts", "known"), [({"Q": "Q: "}, "'Q'$"), ({}, "there are none$")])
def test_a_default_prompt_that_the_file_lacks_is_refused(folder, name, prompts, known):
    named = {"prompts": prompts, "default_prompt_name": name}
    files = {"modules.json": modules("Pooling"), "1_Pooling/config.json": {}}
    place = folder("Qwen3Model", files | {"config_sentence_transformers.json": named})
    with pytest.raises(ValueError, match=rf"formers\.json: default_prompt_name is .*{known}"):
        read(place)


DENSE = {"in_features": 128, "out_features": 3, "activation_function": "torch.nn.modules.Tanh"}


@pytest.mark.parametrize(
    ("kinds", "values", "sentence"),
    [
        (("Pooling",), {"pooling_mode": "max"}, "'max': it must be one of lasttoken, mean, cls"),
        (
            ("Pooling",),
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            r"'cls\+mean'",
        ),
        (("Normalize",), {}, "has Normalize in .*supported are a Transformer"),
        (("Pooling", "LayerNorm"), {}, "has LayerNorm in"),
        (("Pooling", "Dense"), DENSE | {"in_features": 9}, "in_features is 9, .* gives 128"),
        (("Pooling", "Dense"), DENSE | {"activation_function": "x.Softsign"}, "'Softsign'"),
        (("Pooling",), {"include_prompt": "no"}, r"config\.json: include_prompt is 'no'"),
    ],
)
def test_a_folder_that_is_not_supported_is_refused_with_the_reason(folder, kinds, values, sentence):
    files = {f"{i}_{kind}/config.json": values for i, kind in enumerate(kinds, 1)}
    with pytest.raises(ValueError, match=sentence):
        read(folder("Qwen3Model", {"modules.json": modules(*kinds), **files}))


@pytest.mark.parametrize(
    ("name", "options", "fields", "sentence"),
    [
        ("Qwen3Model", {"runner": "generate"}, {}, "names Qwen3Model, which has no head for tok"),
        ("Qwen3ForCausalLM", {"runner": "generate", "convert": "embed"}, {}, "converts nothing"),
        ("Qwen3ForCausalLM", {"runner": "generate", "task": "embed"}, {}, "task is 'embed', which"),
        ("BertModel", {}, {}, "architecture BertModel is not supported"),
        ("Qwen3ForSequenceClassification", {}, {"problem_type": "x"}, "problem_type is 'x'"),
        ("Qwen3ForSequenceClassification", {}, {"problem_type": []}, r"problem_type is \[\]: it"),
        (
            "Qwen3ForSequenceClassification",
            {},
            {"classifier_from_token": ["no"], "is_original_qwen3_reranker": True},
            "must name two tokens",
        ),
        (
            "Qwen3ForSequenceClassification",
            {},
            {"classifier_from_token": ["no", "maybe"]},
            "names 'maybe', which .*tokenizer.json does not have",
        ),
    ],
)
def test_what_contradicts_the_files_is_refused(folder, name, options, fields, sentence):
    files = {"tokenizer.json": {"model": {"vocab": {"no": 1}}, "added_tokens": None}}
    with pytest.raises(ValueError, match=sentence):
        read(folder(name, files, **fields), **options)


def test_an_opt_whose_states_are_projected_is_refused(folder):
    path = folder("OPTModel", word_embed_proj_dim=32)
    with pytest.raises(ValueError, match="states are projected to 32 columns, which is not built"):
        read(path)


def load(path: Path, **options: str):
    return plan_model(path, pooler=read(path, **options)).load()


@pytest.mark.parametrize("name", ["Qwen3Model", "LlamaModel"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_may_lack_their_prefix(saved, name, prefix):
    path = saved(name)
    file = path / "model.safetensors"
    weights = {prefix + each: value for each, value in load_file(file).items()}
    save_file(weights, file)
    model = load(path)
    torch.testing.assert_close(model.model.norm.weight, weights[f"{prefix}norm.weight"])
    assert model.lm_head is None
    del weights[f"{prefix}layers.0.mlp.up_proj.weight"]
    save_file(weights, file)
    with pytest.raises(ValueError, match=r"layers.0.mlp.up_proj.weight \[64, 128\] is missing"):
        load(path)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Qwen3ForSequenceClassification", {"num_labels": 3}),
        ("LlamaForSequenceClassification", {"num_labels": 1}),
        ("LlamaForTokenClassification", {"num_labels": 4}),
    ],
)
def test_a_classifier_s_head_is_the_checkpoint_s_in_fp32(saved, name, fields):
    path = saved(name, **fields)
    head = getattr(transformers, name).from_pretrained(path).score.float()
    model = plan_model(path, pooler=read(path), dtype="bfloat16").load()
    hidden = torch.randn(5, 128).bfloat16()
    found = model.pooler(hidden)
    torch.testing.assert_close(found, head(hidden.float()), atol=1e-5, rtol=1e-5)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_a_reranker_s_label_is_the_difference_of_two_tokens(saved, tied):
    path = saved("Qwen3ForCausalLM", tie_word_embeddings=tied)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    known = {"model": {"vocab": {"no": 7}}, "added_tokens": [{"content": "yes", "id": 9}]}
    (path / "tokenizer.json").write_text(json.dumps(known))
    weights = load_file(path / "model.safetensors")
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    model, hidden = load(path), torch.randn(4, 128)
    want = (hidden @ head.T)[:, [7, 9]].softmax(-1)[:, 1:]
    torch.testing.assert_close(model.pooler.activate(model.pooler(hidden)), want)
    assert model.pooler.config.tasks[0] == "score"
    config["is_original_qwen3_reranker"] = False
    (path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(load(path).pooler(hidden), (hidden @ head.T)[:, [7, 9]])


@pytest.mark.parametrize("is_pickled", [False, True])
def test_dense_layers_are_loaded_from_their_folders(saved, is_pickled):
    path = saved("Qwen3Model")
    layers = [nn.Linear(128, 16), nn.Linear(16, 3, bias=False)]
    listed = modules("Pooling", "Dense", "Dense")
    for index, (layer, activation) in enumerate(zip(layers, ("Tanh", "Identity"), strict=True), 2):
        part = path / f"{index}_Dense"
        listed[index]["path"] = part.name
        part.mkdir()
        values = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
            "activation_function": f"torch.nn.{activation}",
        }
        (part / "config.json").write_text(json.dumps(values))
        named = {f"linear.{name}": value for name, value in layer.state_dict().items()}
        if is_pickled:
            torch.save(named, part / "pytorch_model.bin")
        else:
            save_file(named, part / "model.safetensors")
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    model, hidden = load(path), torch.randn(4, 128)
    torch.testing.assert_close(model.pooler(hidden), layers[1](layers[0](hidden).tanh()))
    assert model.pooler.config.width == 3
    save_file({"linear.weight": layers[1].weight.detach()}, path / "2_Dense" / "model.safetensors")
    with pytest.raises(ValueError, match=r"linear.bias \[16\] is missing"):
        load(path)


@pytest.mark.parametrize(("values", "counts"), [({}, True), ({"include_prompt": False}, False)])
def test_a_pooling_module_decides_whether_a_prompt_counts(folder, values, counts):
    files = {"modules.json": modules("Pooling"), "1_Pooling/config.json": values}
    assert read(folder("Qwen3Model", files)).pools_prompt is counts


@pytest.mark.parametrize(("given", "length"), [(8, 8), (None, 64), (100, 64)])
def test_a_folder_of_sentence_transformers_may_bound_the_length(folder, given, length):
    files = {
        "modules.json": modules("Pooling"),
        "1_Pooling/config.json": {},
        "sentence_bert_config.json": {"max_seq_length": given, "do_lower_case": False},
    }
    path = folder("Qwen3Model", files)
    found = describe(path)
    planned = plan_model(path, pooler=found.pooler, load_format="dummy")
    for config in (found.config, planned.config):
        assert config.max_length == length
        place = "max_seq_length in" if length == 8 else "max_position_embeddings and"
        assert config.length_place.startswith(place)


def test_texts_that_should_become_lower_case_are_refused(folder):
    files = {
        "modules.json": modules("Pooling"),
        "1_Pooling/config.json": {},
        "sentence_bert_config.json": {"do_lower_case": True},
    }
    with pytest.raises(ValueError, match=r"sentence_bert_config\.json: do_lower_case is true"):
        read(folder("Qwen3Model", files))


@pytest.mark.parametrize(
    ("name", "kind"), [("Model", "embed"), ("ForSequenceClassification", "classify")]
)
def test_classes_of_gemma_3_s_text_part_are_its_family_s(folder, name, kind):
    path = folder(f"Gemma3Text{name}", model_type="gemma3_text")
    assert describe(path).config.architecture == "Gemma3ForCausalLM"
    assert read(path).kind == kind


def test_a_classifier_gives_embeddings_without_its_head(saved):
    path = saved("LlamaForSequenceClassification")
    assert load(path, convert="embed").pooler.config.kind == "embed"


def test_dummy_weights_need_no_files(folder):
    path = folder("Qwen3ForSequenceClassification")
    model = plan_model(path, pooler=read(path), load_format="dummy").load()
    assert model.pooler(torch.ones(1, 128)).isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: file.mkdir(), r"modules\.json is a folder, not a file"),
        (os.mkfifo, r"modules\.json is a pipe or a device, not a file"),
        (lambda file: file.symlink_to("gone"), r"modules\.json links to gone, which is gone"),
        (lambda file: file.write_text("[" * 10**5), r"modules\.json is nested too deeply"),
        (lambda file: file.write_text("5"), r"modules\.json is not a list of modules"),
    ],
)
def test_16_a_modules_json_that_is_none_is_named(folder, make, message):
    path = folder("Qwen3Model")
    make(path / "modules.json")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(path)
