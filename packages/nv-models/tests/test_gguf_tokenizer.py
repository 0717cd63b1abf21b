"""The tokenizer that a GGUF file carries, through transformers' AutoTokenizer."""

import pytest
from gguf import GGMLQuantizationType as Kind
from nv_models import resolve
from transformers import AutoTokenizer

SPACE = "\u2581"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer_of(tiny_checkpoint, write_gguf, tmp_path):
    """The tokenizer of a file written with the given options."""

    def make(**options):
        write_gguf(tiny_checkpoint("llama"), tmp_path / "model.gguf", Kind.F16, **options)
        return AutoTokenizer.from_pretrained(resolve(tmp_path / "model.gguf"))

    return make


TEXT = "<|turn|> hi hï  12345\n<|end|>"


@pytest.mark.parametrize(
    ("pre", "digits", "has_bos"),
    [
        ("smollm", ["1", "2", "3", "4", "5"], False),
        ("qwen2", ["1", "2", "3", "4", "5"], False),
        ("llama-bpe", ["123", "4", "5"], True),
        ("gpt-2", ["1234", "5"], False),
    ],
)
def test_byte_level(tokenizer_of, pre, digits, has_bos):
    tokenizer = tokenizer_of(pre=pre)
    ids = tokenizer(TEXT).input_ids
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert (pieces[:2] == ["<|turn|>", "<|turn|>"]) == has_bos
    assert tokenizer.decode(ids[1:] if has_bos else ids) == TEXT
    assert [piece for piece in pieces if piece.isdigit()] == digits
    assert "Ġhi" in pieces
    assert pieces[-1] == "<|end|>"
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.bos_token == "<|turn|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == " hi hï  12345\n"


def test_chat_template(tokenizer_of):
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer_of().apply_chat_template(messages, tokenize=False)
    assert text == "<|turn|>hi<|end|>"


def test_unknown_word_splitter(tokenizer_of):
    with pytest.raises(ValueError, match="'martian' is not supported; supported are smollm"):
        tokenizer_of(pre="martian")


def test_unknown_kind(tokenizer_of):
    with pytest.raises(ValueError, match="kind 'bert'; supported are gpt2, llama"):
        tokenizer_of(tokenizer={"model": "bert", "tokens": ["a"]})


def test_sentencepiece(tokenizer_of):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [SPACE, "t", "h", "e", "i", "s", "th", "the", SPACE + "the", "is", SPACE + "is"]
    scores = [0.0] * len(pieces) + [-20.0] * 6 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    tokens = pieces + words
    padding = [f"[{index}]" for index in range(320 - len(tokens))]
    tokenizer = tokenizer_of(
        tokenizer={
            "model": "llama",
            "tokens": tokens + padding,
            "scores": scores + [-99.0] * len(padding),
            "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words) + [5] * len(padding),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        }
    )
    text = "the is é"
    ids = tokenizer(text).input_ids
    got = tokenizer.convert_ids_to_tokens(ids)
    assert got == ["<s>", SPACE + "the", SPACE + "is", SPACE, "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


TOKENS = [f"[{index}]" for index in range(320)]
SENTENCEPIECE = {"model": "llama", "tokens": TOKENS, "scores": [0.0] * 320}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": 900}, "eos_token_id is 900, but must be the id of one of the 320 tokens"),
        ({"bos_token_id": 900}, "bos_token_id is 900, but must be the id"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end', but must be the id"),
        ({"padding_token_id": 320}, "padding_token_id is 320, but must be the id"),
        ({"tokens": TOKENS[:3], "eos_token_id": 3}, "merges"),
        ({"tokens": None}, "lacks the metadata tokenizer.ggml.tokens"),
        (
            {"tokens": [1, 2, 3]},
            r"tokens is \[1, 2, 3\] \(3 values\), but must be a list of strings",
        ),
        ({"merges": None}, "lacks the metadata tokenizer.ggml.merges"),
        ({"merges": ["h i", "hi"]}, r"merges\[1\] is 'hi', but must be two tokens"),
        ({"merges": ["h nothing"]}, r"merges\[0\] is 'h nothing', but must be two tokens"),
        ({"merges": ["h h"]}, r"merges\[0\] is 'h h', but must be two tokens"),
        ({"merges": [1]}, "merges is .* but must be a list of strings"),
        ({"model": 5}, "model is 5, but must be a string"),
        ({"pre": 5}, "pre is 5, but must be a string"),
        ({"token_type": [1]}, "token_type is .* but must be a list of 320 numbers"),
        ({"add_bos_token": "no"}, "add_bos_token is 'no', but must be true or false"),
        ({**SENTENCEPIECE, "scores": None}, "lacks the metadata tokenizer.ggml.scores"),
        ({**SENTENCEPIECE, "scores": [1.0]}, "scores is .* but must be a list of 320 numbers"),
        ({**SENTENCEPIECE, "unknown_token_id": 900}, "unknown_token_id is 900, but must be"),
    ],
)
def test_damaged_metadata(tokenizer_of, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        tokenizer_of(tokenizer_changes=changes)
    assert str(tmp_path / "model.gguf") in str(error.value)
    assert str(error.value).endswith("download or convert the file again")
