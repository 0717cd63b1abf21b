import json
import logging
import os
import shutil

import nv_api.tokenizer
import pytest
from nv_api.tokenizer import Tokenizer, load_tokenizer
from nv_models.locate import TOKENIZER_FILES
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def test_a_folder_without_tokenizer_files_is_refused_with_the_fix(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer=…, or pass skip_tokenizer_init=True"):
        load_tokenizer(tmp_path)


def test_other_modes_are_not_built(folder):
    with pytest.raises(NotImplementedError, match="tokenizer_mode='mistral'"):
        load_tokenizer(folder, mode="mistral")


@pytest.mark.filterwarnings("ignore:.*is a part of ordinary text")  # the EOS of the model's own
def test_the_tokenizer_option_names_another_folder(scripted, tmp_path, sentence_piece):
    sentence_piece.save_pretrained(tmp_path)
    llm = scripted(tokenizer=str(tmp_path))
    assert isinstance(llm.tokenizer, PreTrainedTokenizerFast)
    assert llm.get_tokenizer().eos_token == "</s>"


def test_many_texts_are_encoded_as_each_alone(byte_level):
    tokenizer = Tokenizer(byte_level)
    texts = ["hello", "", "a longer text, 日本"]
    assert tokenizer.encode(texts) == [byte_level.encode(text) for text in texts]
    assert tokenizer.encode([]) == []


def test_how_long_a_text_may_be_is_the_engines_business(monkeypatch, folder):
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    backend = load_tokenizer(folder)
    backend.model_max_length = 4
    assert len(Tokenizer(backend).encode(["abcdefgh"])[0]) == 8
    assert said == []


@pytest.mark.parametrize("place", ["{folder}/nope", "./nope", "a/b/c", "model.gguf/"])
def test_a_place_that_is_not_there(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = place.format(folder=tmp_path)
    with pytest.raises(
        FileNotFoundError, match=f"tokenizer {place} is neither a folder nor a hub name"
    ):
        load_tokenizer(place)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "dead link", "folder"])
def test_16_no_file_in_place_of_a_file(folder, tmp_path, name, kind):
    """A reader of a pipe would wait for a writer."""
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(copy / name)
    elif kind == "folder":
        (copy / name).mkdir()
    else:
        (copy / name).symlink_to(copy / "gone")
    message = {"pipe": "is a pipe", "dead link": "links to .*gone", "folder": "is a folder"}[kind]
    with pytest.raises(FileNotFoundError, match=f"{name} {message}"):
        load_tokenizer(copy)


@pytest.mark.parametrize("error", [FileNotFoundError, ValueError])
@pytest.mark.parametrize("name", ["missing/missing", "gpt2"])
def test_a_hub_name_out_of_reach(monkeypatch, error, name):
    """It is asked for once; transformers would ask for each file, and again and again."""
    asked = []

    def unreachable(*given):
        asked.append(given)
        raise error("no connection")

    monkeypatch.setattr(nv_api.tokenizer, "download", unreachable)
    with pytest.raises(error, match=rf"{name} cannot be loaded \(no connection\): give"):
        load_tokenizer(name, revision="v1")
    assert asked == [(name, "v1", TOKENIZER_FILES)]


def test_a_hub_name_is_a_downloaded_folder(monkeypatch, folder):
    monkeypatch.setattr(nv_api.tokenizer, "download", lambda *given: folder)
    assert load_tokenizer("some/name").get_vocab() == load_tokenizer(folder).get_vocab()


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"]},
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2},
        {"head_dim": None},
        {"use_cache": "x"},
        {"dtype": "foo"},
        {"model_type": "unknown"},
        {"model_type": 5},
        {"tokenizer_class": 5},
    ],
)
def test_the_models_sizes_are_not_the_tokenizers_business(damaged, folder, change):
    config = json.loads((folder / "config.json").read_text()) | change
    place = damaged("config.json", json.dumps(config))
    backend, plain = load_tokenizer(place), AutoTokenizer.from_pretrained(folder)
    assert type(backend) is type(plain)
    assert backend.get_vocab() == plain.get_vocab()
    assert backend.encode("hello 日本") == plain.encode("hello 日本")


@pytest.fixture
def damaged(folder, tmp_path):
    """Write a file of a model's copy anew, and return the copy."""

    def write(name, content):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        (copy / name).write_text(content)
        return copy

    return write


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", json.dumps({"version": "1.0", "added_tokens": []})),
        ("tokenizer.json", json.dumps({"version": "1.0", "added_tokens": [], "model": {}})),
        ("tokenizer.json", json.dumps({"added_tokens": [5]})),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", json.dumps({"eos_token": 5})),
    ],
)
def test_damaged_files_are_refused_with_their_folder_and_the_fix(damaged, name, content):
    place = damaged(name, content)
    with pytest.raises(ValueError, match=r"are not a tokenizer .*: download them again") as error:
        load_tokenizer(place)
    assert str(place) in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_max_length", "77"), ("model_max_length", [5]), ("model_input_names", 5)],
)
@pytest.mark.parametrize("has_json", [True, False])
def test_16_a_value_of_another_type_is_named(damaged, byte_level, name, value, has_json):
    place = damaged("tokenizer_config.json", json.dumps({name: value}))
    if not has_json:
        byte_level.backend_tokenizer.model.save(str(place))
        (place / "tokenizer.json").unlink()
        values = {"tokenizer_class": "GPT2Tokenizer", name: value}
        (place / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"{name} is .*: it must be a (number|list of names)"):
        load_tokenizer(place)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_16_a_file_that_is_not_utf8_is_named(damaged, name):
    place = damaged(name, "")
    (place / name).write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(ValueError, match=rf"{name} is not UTF-8: write it anew, or give a token"):
        load_tokenizer(place)
