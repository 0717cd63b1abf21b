"""The tokenizer that a GGUF file carries, through transformers' AutoTokenizer."""

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from nv_models import ModelConfig, resolve
from tokenizers import pre_tokenizers
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
        (
            {"tokens": TOKENS[:3], "eos_token_id": 3},
            r"\(3 values\), but must be 320 strings, one per",
        ),
        ({"tokens": [*TOKENS, "more"]}, r"\(321 values\), but must be 320 strings, one per row"),
        ({"tokens": ["[7]", *TOKENS[1:]]}, r"tokens\[7\] is '\[7\]', but must be another token"),
        ({"scores": [1.0]}, "scores is .* but must be a list of 320 numbers"),
        ({"mask_token_id": 900}, "mask_token_id is 900, but must be the id"),
        ({"eom_token_id": 900}, "eom_token_id is 900, but must be the id"),
        ({"add_eos_token": 1}, "add_eos_token is 1, but must be true or false"),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"martian": 1}, r"holds tokenizer\.ggml\.martian, which is not supported"),
        ({"remove_extra_whitespaces": True}, "holds .*remove_extra_whitespaces, which is not supp"),
        ({"precompiled_charsmap": [1, 2]}, "holds .*precompiled_charsmap, which is not supported"),
    ],
)
def test_a_key_that_would_change_tokens_is_refused(tokenizer_of, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        tokenizer_of(tokenizer_changes=changes)
    assert str(tmp_path / "model.gguf") in str(error.value)


def test_keys_that_change_nothing(tokenizer_of):
    changes = {"remove_extra_whitespaces": False, "add_space_prefix": False, "mask_token_id": 3}
    assert tokenizer_of(tokenizer_changes=changes)(TEXT) == tokenizer_of()(TEXT)


def test_eos_after_every_text_where_the_file_asks_for_it(tokenizer_of):
    changes = {"add_bos_token": True, "add_eos_token": True}
    ids = tokenizer_of(tokenizer_changes=changes)("hi").input_ids
    assert (ids[0], ids[-1], len(ids)) == (1, 0, 3)


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3"])
def test_every_name_of_llama_3s_words_means_the_same(tokenizer_of, pre):
    assert tokenizer_of(pre=pre)(TEXT) == tokenizer_of(pre="llama-bpe")(TEXT)


def test_named_chat_templates(tokenizer_of, monkeypatch):
    add = GGUFWriter.write_header_to_file

    def with_another(writer):
        writer.add_string("tokenizer.chat_template.tool_use", "tools")
        add(writer)

    monkeypatch.setattr(GGUFWriter, "write_header_to_file", with_another)
    default = "{% for m in messages %}<|turn|>{{ m['content'] }}<|end|>{% endfor %}"
    assert tokenizer_of().chat_template == {"default": default, "tool_use": "tools"}


@pytest.mark.parametrize(
    ("texts", "changes", "ends"),
    [
        ({7: "<|im_end|>"}, {}, (0, 1, 7)),
        ({7: "<|eot_id|>", 9: "<|eom_id|>"}, {"eot_token_id": None}, (0, 7, 9)),
        ({7: "<end_of_turn>", 9: "</s>"}, {"eos_token_id": None}, (1, 7, 9)),
        ({7: "<|endoftext|>"}, {"eos_token_id": 5, "eot_token_id": 6}, (5, 6, 7)),
        ({}, {"eom_token_id": 8, "fim_pad_token_id": 9}, (0, 1, 8, 9)),
        ({5: "<|file_sep|>", 6: "<|fim_pad|>", 7: "<|fim_prefix|>"}, {}, (0, 1, 5, 6)),
        ({5: "<|end|>", 6: "<|return|>", 7: "<|call|>"}, {}, (0, 1, 6, 7)),
    ],
)
def test_b03_ends_that_a_gguf_file_knows_by_their_texts(
    tiny_checkpoint, write_gguf, tmp_path, texts, changes, ends
):
    at = {place: 300 + place for place in texts}  # padding else
    tokens = [f"[{index}]" for index in range(320)]
    alphabet = ["<|end-|>", "<|turn|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "hi"]
    tokens[: len(alphabet)] = alphabet
    for place, text in texts.items():
        tokens[at[place]] = text
    values = {"tokens": tokens, "merges": ["h i"], **changes}
    write_gguf(tiny_checkpoint("llama"), tmp_path / "m.gguf", Kind.F16, tokenizer_changes=values)
    folder = resolve(tmp_path / "m.gguf")
    expected = {at.get(end, end) for end in ends}
    assert set(ModelConfig.from_path(folder).ends()) == expected
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for place, text in texts.items():
        if place in ends:
            assert tokenizer(f"hi{text}").input_ids[-1] == at[place]
            assert tokenizer.decode([at[place]], skip_special_tokens=True) == ""


def test_b03_a_sentencepiece_vocabulary_that_names_no_ids(tokenizer_of, tmp_path):
    tokenizer = tokenizer_of(tokenizer=SENTENCEPIECE)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert ModelConfig.from_path(resolve(tmp_path / "model.gguf")).ends() == (2,)
