"""Which tokens end a text: those of config.json, generation_config.json and the tokenizer."""

import json
import shutil
import warnings

import pytest
from nv_api import LLM, SamplingParams
from nv_api.options import parse
from nv_api.start import prepare

PROMPT = [50, 60, 70]
PLAIN = "is a part of ordinary text: an answer ends where it comes; correct it there, or pass"
pytestmark = pytest.mark.filterwarnings("ignore:.*is a part of ordinary text")
"""The tests end texts with tokens that come soon."""
WORDS = list(range(256))
"""Ids of single bytes: no special token."""


def greedy(**changes):
    fields = {"temperature": 0, "max_tokens": 6, "allowed_token_ids": WORDS, "presence_penalty": 2}
    return SamplingParams(**fields, **changes)


@pytest.fixture(scope="module")
def free(checkpoint):
    """The model's continuation where nothing ends it."""
    with LLM(checkpoint, device="cpu", max_model_len=64) as llm:
        (output,) = llm.generate([PROMPT], greedy(ignore_eos=True), use_tqdm=False)
    token_ids = output.outputs[0].token_ids
    assert len(set(token_ids)) == len(token_ids)
    return token_ids


@pytest.fixture
def ending(checkpoint, tmp_path, free):
    """A copy of the checkpoint whose tokenizer ends texts with the third token of `free`."""
    copy = tmp_path / "model"
    shutil.copytree(checkpoint, copy)

    def change(name, **values):
        known = json.loads((copy / name).read_text()) | values
        (copy / name).write_text(json.dumps({k: v for k, v in known.items() if v != "out"}))
        return copy

    tokens = json.loads((copy / "tokenizer.json").read_text())["model"]["vocab"]
    change("tokenizer_config.json", eos_token=next(t for t, i in tokens.items() if i == free[2]))
    return change


def completion(folder, params, **options):
    with LLM(str(folder), device="cpu", max_model_len=64, **options) as llm:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return output.outputs[0]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config.json", {}),
        ("config.json", {"eos_token_id": None}),
        ("config.json", {"eos_token_id": "out"}),
        ("config.json", {"eos_token_id": [257, 258]}),
        ("generation_config.json", {"eos_token_id": 257}),
    ],
)
def test_b03_the_tokenizers_eos_ends_a_text(ending, free, name, values):
    ended = completion(ending(name, **values), greedy())
    assert (ended.token_ids, ended.finish_reason) == (free[:3], "stop")
    assert ended.stop_reason is None


def test_b03_the_other_files_ids_end_a_text_too(ending, free):
    folder = ending("generation_config.json", eos_token_id=free[1])
    assert completion(folder, greedy()).token_ids == free[:2]
    folder = ending("config.json", eos_token_id=[257, free[0]])
    assert completion(folder, greedy()).token_ids == free[:1]


def test_b03_ignore_eos_covers_it(ending, free):
    ended = completion(ending("config.json"), greedy(ignore_eos=True))
    assert (ended.token_ids, ended.finish_reason) == (free, "length")


def test_b03_min_tokens_covers_it(ending, free):
    ended = completion(ending("config.json"), greedy(min_tokens=5))
    assert ended.token_ids[:2] == free[:2]
    assert free[2] not in ended.token_ids[:5]


def test_b03_the_eos_of_another_tokenizer_given_by_name(ending, checkpoint, free):
    ended = completion(checkpoint, greedy(), tokenizer=str(ending("config.json")))
    assert ended.token_ids == free[:3]


def test_b03_without_a_tokenizer_the_files_decide(ending, free):
    folder = ending("config.json", eos_token_id=free[3])
    assert completion(folder, greedy(), skip_tokenizer_init=True).token_ids == free[:4]


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(ending):
    folder = ending("config.json", vocab_size=260)
    with pytest.raises(ValueError, match=r"has 268 token ids and the model of .* has a voc.* 260"):
        LLM(str(folder), device="cpu")


def prepared(folder, **options):
    """The warnings of a start, up to the weights."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(parse(str(folder), {"device": "cpu", **options}))
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("name", "values", "key"),
    [
        ("config.json", {"eos_token_id": 68}, "config.json: eos_token_id"),
        ("config.json", {"eos_token_id": [256, 68]}, "config.json: eos_token_id"),
        ("config.json", {"eos_token_id": [68] * 1000}, "config.json: eos_token_id"),
        ("generation_config.json", {"eos_token_id": 68}, "generation_config.json: eos_token_id"),
        ("tokenizer_config.json", {"eos_token": "e"}, ": the id of the tokenizer's eos_token"),
    ],
)
def test_b03_an_end_that_is_a_letter_is_warned_of(folder, tmp_path, name, values, key):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    known = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
    (copy / name).write_text(json.dumps(known | values))
    (warning,) = prepared(copy)
    assert warning.startswith(f"{copy}")
    assert f"{key} is 68, the token 'e', which {PLAIN}" in warning


@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_b03_a_folder_without_an_end_is_warned_of(folder, tmp_path, kind):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    for name, key in ("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token"):
        known = json.loads((copy / name).read_text())
        del known[key]
        changed = known | ({"architectures": [kind]} if key == "eos_token_id" else {})
        (copy / name).write_text(json.dumps(changed))
    (warning,) = prepared(copy)
    if kind == "Qwen3ForCausalLM":
        assert warning.startswith(f"{copy} names no EOS (eos_token_id of config.json and genera")
    else:
        assert f"eos_token_id is missing, and its default for {kind} is 2, the token" in warning
    assert prepared(copy, skip_tokenizer_init=True) == []


def test_b03_a_folder_whose_end_is_right_gives_no_warning(folder):
    assert prepared(folder) == []


def test_b03_a_warning_of_an_end_shows_the_user_s_line(ending):
    with pytest.warns(UserWarning, match=PLAIN) as seen:
        completion(ending("config.json"), greedy())
    assert {each.filename for each in seen} == {__file__}
