"""B03's siblings: ends of a GGUF file that cannot be right are warned of, at each load."""

import warnings

import pytest
from gguf import GGMLQuantizationType as Kind
from nv_models import read_config, resolve
from nv_models.checkpoint.gguf.ends import is_plain_text
from tokenizers import pre_tokenizers

COMES = "which is a part of ordinary text: an answer ends where it comes; convert the file again"
NONE = (
    "tokenizer.ggml has neither eos_token_id nor eot_token_id, and no token that ends a text by "
    "its name, such as <|im_end|>: texts end at max_tokens or a stop string only; convert the file "
    "again, or pass stop_token_ids"
)
TOKENS = ["<first>", "<|turn|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
TOKENS += [*("hi", "12", "123", "1234", "Ġhi")]
TOKENS += [f"[{index}]" for index in range(320 - len(TOKENS))]
"""The tokens of `write_gguf`, without <|end|>, which ends a text by its name."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def loaded(tiny_checkpoint, write_gguf, tmp_path):
    """The config of a file whose tokenizer is changed, and the warnings without its name."""
    file = tmp_path / "m.gguf"

    def load(**changes):
        if not file.exists():
            write_gguf(tiny_checkpoint("llama"), file, Kind.F32, tokenizer_changes=changes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = read_config(resolve(file))
        messages = [str(each.message) for each in caught]
        assert all(message.startswith(f"{file}: ") for message in messages)
        return config, [message.removeprefix(f"{file}: ") for message in messages]

    return load


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "eom_token_id"])
def test_B03_an_end_that_is_a_letter_is_warned_of(loaded, key):
    config, messages = loaded(**{key: 70})
    assert len(messages) == 1
    assert messages[0].startswith(f"tokenizer.ggml.{key} is 70, the token 'e', {COMES}")
    assert 70 in config.ends()  # as llama.cpp runs it


def test_B03_a_file_without_an_end_is_warned_of_at_each_load(loaded):
    config, messages = loaded(eos_token_id=None, eot_token_id=None, tokens=TOKENS)
    assert messages == [NONE]
    assert config.ends() == ()
    assert loaded()[1] == [NONE]  # the folder is in the cache now


def test_B03_ends_that_are_right_give_no_warning(loaded):
    assert loaded()[1] == []


@pytest.mark.parametrize("token", ["e", "the", "Ġthe", "▁a", "Ċ", "\n", "<0x0A>", "<", "[", "."])
def test_B03_a_part_of_ordinary_text(token):
    assert is_plain_text(token)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "</s>",
        "<|im_end|>",
        "<eos>",
        "[EOS]",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
        "<EOT>",
        "_<EOT>",
        "{end}",
    ],
)
def test_B03_a_token_of_markup(token):
    assert not is_plain_text(token)
