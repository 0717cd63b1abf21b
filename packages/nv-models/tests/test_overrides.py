"""hf_overrides: fields in place of those of config.json."""

import json

import pytest
from nv_models import load_model, read_config
from nv_models.overrides import merged, plain_overrides

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0,
        "original_max_position_embeddings": 256}  # fmt: skip


def test_a_field_replaces_the_file_s():
    raw = {"a": {"x": 1, "y": 2}, "text_config": {"x": 1, "y": {"z": 3}}, "b": 1}
    changed = merged(raw, {"a": {"x": 5}, "text_config": {"y": 4}, "c": None})
    assert changed == {"a": {"x": 5}, "text_config": {"x": 1, "y": 4}, "b": 1, "c": None}
    assert raw["text_config"] == {"x": 1, "y": {"z": 3}}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_theta"])
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_a_rope_is_changed_in_either_spelling(tiny_checkpoint, paged_runner, spelling, name):
    folder = tiny_checkpoint(rope={"rope_type": "linear", "factor": 4.0}, spelling=spelling)
    model = load_model(folder, hf_overrides={name: YARN})
    rope = model.config.ropes[0]
    assert (rope.rope_type, rope.rope_theta, model.config.max_length) == ("yarn", 500.0, 512)
    logits = paged_runner(model).step(range(40))
    config = json.loads((folder / "config.json").read_text())
    for each in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(each, None)
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": YARN}))
    assert (paged_runner(load_model(folder)).step(range(40)) == logits).all()


def test_errors_name_the_file_and_the_overrides(tiny_checkpoint):
    folder = tiny_checkpoint()
    with pytest.raises(ValueError, match=r"config.json with hf_overrides: num_hidden_layers is 0"):
        read_config(folder, {"num_hidden_layers": 0})
    with pytest.raises(ValueError, match=r"config.json with hf_overrides: architecture None"):
        read_config(folder, {"architectures": ["None"]})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (5, "hf_overrides is 5: it must be a dict of fields of config.json"),
        ([{"a": 1}], "it must be a dict of fields"),
        ({1: 2}, "it must be a dict of fields"),
        (lambda config: config, "hf_overrides is a function: it must be a dict"),
        ({"a": {1, 2}}, "hf_overrides must hold values of JSON only"),
        ({"a": float("nan")}, "hf_overrides must hold values of JSON only"),
    ],
)
def test_what_is_no_set_of_fields_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        plain_overrides(overrides)


def test_the_overrides_are_a_copy():
    given = {"a": {"b": [1]}}
    copy = plain_overrides(given)
    given["a"]["b"].append(2)
    assert copy == {"a": {"b": [1]}}
    assert plain_overrides(None) is None
