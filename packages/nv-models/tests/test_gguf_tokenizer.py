"""The tokenizer that a GGUF file carries, through transformers' AutoTokenizer."""

import math

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from nv_models import read_config, resolve
from nv_models.byte_level import BYTE_OF_CHARACTER
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


TOKENS = [f"[{index}]" for index in range(320)]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_LEVEL = ["<|end|>", "<|turn|>", *ALPHABET, "hi", *TOKENS[259:]]
LLAMA = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *TOKENS[260:]]
SENTENCEPIECE = {
    "model": "llama",
    "tokens": LLAMA,
    "scores": [0.0] * 320,
    "token_type": [2, 3, 3, *[6] * 256, 1, *[1] * 60],
}


def without(tokens, *gone):
    """The tokens, with others in the place of some."""
    return [f"<gone {token}>" if token in gone else token for token in tokens]


def with_at(values, index, value):
    return [*values[:index], value, *values[index + 1 :]]


BYTE_LEVEL_CHANGES = {"tokens": BYTE_LEVEL, "merges": ["h i"], "token_type": [3, 3, *[1] * 318]}
TYPES = BYTE_LEVEL_CHANGES["token_type"]
SCORES = [0.0] * 320

TEXT = "<|turn|> hi hï  12345\n<|end|>"


@pytest.mark.parametrize(
    ("pre", "digits", "has_bos"),
    [
        ("smollm", ["1", "2", "3", "4", "5"], False),
        ("qwen2", ["1", "2", "3", "4", "5"], False),
        ("llama-bpe", ["123", "4", "5"], True),
        ("gpt-2", ["1234", "5"], False),
        ("exaone4", ["1234", "5"], False),
        ("glm4", ["123", "4", "5"], False),
        ("gpt-4o", ["123", "4", "5"], False),
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


@pytest.mark.parametrize("pre", [None, "default"])
def test_16_words_without_a_name_are_llama_cpps_and_are_warned_of(tokenizer_of, pre):
    """Files from before April 2024 have none, Llama 3's among them."""
    with pytest.warns(
        UserWarning, match=r"tokenizer\.ggml\.pre is (missing|'default'), so that .* tokenizer="
    ):
        tokenizer = tokenizer_of(tokenizer_changes={"pre": pre})
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    text = " it's +12345=6, (ab)  c\n d"
    words = [text[first:last] for _, (first, last) in splitter.pre_tokenize_str(text)]
    assert words == [
        " it", "'", "s", " ", "+", "123", "45", "=", "6", ",", " ", "(", "ab", ")", " ", " c",
        "\n", " d",
    ]  # fmt: skip


def test_words_of_gpt_oss_end_where_case_does(tokenizer_of):
    splitter = tokenizer_of(pre="gpt-4o").backend_tokenizer.pre_tokenizer
    text = "(ThatIt'S, helloWorld HTTPServer ÄÖü 漢字a 1234 a//\n\n  b \n\u0301AB"
    words = [text[first:last] for _, (first, last) in splitter.pre_tokenize_str(text)]
    assert words == [
        "(That", "It'S", ",", " hello", "World", " HTTPServer", " ÄÖü", " 漢字a", " ", "123", "4",
        " a", "//\n\n", " ", " b", " \n", "\u0301", "AB",
    ]  # fmt: skip


@pytest.mark.parametrize(("pre", "is_whole"), [("glm4", True), ("chatglm-bpe", False)])
def test_words_of_glm_4(tokenizer_of, pre, is_whole):
    """As llama.cpp reads them: a word that is a token is one, and a key decides about BOS."""
    tokens = [*BYTE_LEVEL[:-1], "hid"]  # no merge makes it
    changes = {**BYTE_LEVEL_CHANGES, "tokens": tokens, "add_bos_token": True}
    tokenizer = tokenizer_of(pre=pre, tokenizer_changes=changes)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("hid").input_ids)
    assert pieces == ["<|turn|>", *(["hid"] if is_whole else ["hi", "d"])]


def test_chat_template(tokenizer_of):
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer_of().apply_chat_template(messages, tokenize=False)
    assert text == "<|turn|>hi<|end|>"


def test_a_vocabulary_without_bytes_that_no_text_holds(tokenizer_of):
    """SmolLM2's: its tokenizer was trained on text without these 21 bytes."""
    lost = [4, 6, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)]
    gone = {character for character, byte in BYTE_OF_CHARACTER.items() if byte in lost}
    assert len(gone) == 21
    tokenizer = tokenizer_of(
        tokenizer_changes={"tokens": without(BYTE_LEVEL, *gone), "merges": ["h i"]}
    )
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT


@pytest.mark.parametrize(
    ("changes", "metadata", "message"),
    [
        (
            {"tokens": with_at(BYTE_LEVEL, 300, "")},
            {},
            r"tokenizer\.ggml: tokens\[300\] is an empty text, which no text is cut into",
        ),
        (
            {"tokens": ["", "", *BYTE_LEVEL[2:318], "", ""], "token_type": None},
            {},
            r"tokens\[0\], tokens\[1\], tokens\[318\], and 1 more is an empty text",
        ),
        (
            {"bos_token_id": None, "add_bos_token": True},
            {},
            "add_bos_token is true, and there is no bos_token_id: texts begin without one",
        ),
        ({}, {"vocab_size": 319}, r"llama\.vocab_size is 319, and there are 320 tokens and rows"),
        ({}, {"vocab_size": 4_000_000_000}, "vocab_size is 4000000000, and there are 320"),
        (
            {"token_type": [3] * 319 + [1]},
            {},
            r"token_type of 'ĉ', 'Ċ', 'č', and 206 more is 3 \(control\), so that these are left",
        ),
        (
            {"token_type": with_at(TYPES, 2, 3)},
            {},
            r"token_type of '!' is 3 \(control\)",
        ),
        (
            {**SENTENCEPIECE, "token_type": with_at(SENTENCEPIECE["token_type"], 13, 3)},
            {},
            r"token_type of '<0x0A>' is 3 \(control\)",
        ),
        (
            {**SENTENCEPIECE, "token_type": [*SENTENCEPIECE["token_type"][:259], 3, *[1] * 60]},
            {},
            r"token_type of '\u2581' is 3 \(control\)",
        ),
    ],
)
def test_what_llama_cpp_runs_is_warned_of_at_every_load(
    tokenizer_of, tmp_path, changes, metadata, message
):
    changes = BYTE_LEVEL_CHANGES | changes
    with pytest.warns(UserWarning, match=message) as first:
        tokenizer_of(tokenizer_changes=changes, metadata=metadata)
    assert str(first[0].message).startswith(f"{tmp_path / 'model.gguf'}: ")
    with pytest.warns(UserWarning, match=message):  # from the folder, which is there now
        resolve(tmp_path / "model.gguf")


@pytest.mark.parametrize("vocab_size", [0, "320"])
def test_a_vocab_size_that_is_none(tokenizer_of, vocab_size):
    with pytest.raises(ValueError, match=rf"vocab_size is {vocab_size!r}: it must be a positive"):
        tokenizer_of(metadata={"vocab_size": vocab_size})


def test_a_vocab_size_that_is_right_gives_no_warning(tokenizer_of):
    assert tokenizer_of(metadata={"vocab_size": 320})(TEXT) == tokenizer_of()(TEXT)


def test_unknown_word_splitter(tokenizer_of):
    with pytest.raises(ValueError, match="'martian' is not supported; supported are smollm"):
        tokenizer_of(pre="martian")


def test_unknown_kind(tokenizer_of):
    with pytest.raises(ValueError, match="kind 'bert'; supported are gpt2, llama"):
        tokenizer_of(tokenizer={"model": "bert", "tokens": ["a"]})


@pytest.mark.parametrize(("name", "strips"), [("Phi3", True), ("Mixtral", False)])
def test_tokens_of_phi_3_take_the_space_after_them(tiny_model, write_gguf, tmp_path, name, strips):
    tokens = [*LLAMA[:-2], "<|user|>", "<|endoftext|>"]
    kinds = [*SENTENCEPIECE["token_type"][:-2], 3, 3]
    values = SENTENCEPIECE | {"tokens": tokens, "token_type": kinds, "add_space_prefix": False}
    keys = {"rope.dimension_count": 12, "rope.scaling.original_context_length": 32}
    write_gguf(
        tiny_model(name),
        tmp_path / "m.gguf",
        Kind.F32,
        tokenizer=values,
        metadata=keys if name == "Phi3" else {},
    )
    tokenizer = AutoTokenizer.from_pretrained(resolve(tmp_path / "m.gguf"))
    newline = "<0x0A>"
    ids = tokenizer("<|user|>\n<|endoftext|>\n", add_special_tokens=False).input_ids
    got = tokenizer.convert_ids_to_tokens(ids)
    assert got == ["<|user|>", *([] if strips else [newline]), "<|endoftext|>", newline]


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": 900}, "eos_token_id is 900: it must be the id of one of the 320 tokens"),
        ({"bos_token_id": 900}, "bos_token_id is 900: it must be the id"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end': it must be the id"),
        ({"padding_token_id": 320}, "padding_token_id is 320: it must be the id"),
        (
            {"tokens": TOKENS[:3], "eos_token_id": 3},
            r"\(3 values\): it must be 320 strings, one per",
        ),
        ({"tokens": [*TOKENS, "more"]}, r"\(321 values\): it must be 320 strings, one per row"),
        ({"tokens": ["[7]", *TOKENS[1:]]}, r"tokens\[7\] is '\[7\]': it must be another token"),
        ({"scores": [1.0]}, "scores is .*: it must be a list of 320 numbers"),
        ({"mask_token_id": 900}, "mask_token_id is 900: it must be the id"),
        ({"eom_token_id": 900}, "eom_token_id is 900: it must be the id"),
        ({"add_eos_token": 1}, "add_eos_token is 1: it must be true or false"),
        ({"tokens": None}, "lacks the metadata tokenizer.ggml.tokens"),
        (
            {"tokens": [1, 2, 3]},
            r"tokens is \[1, 2, 3\] \(3 values\): it must be a list of strings",
        ),
        ({"merges": None}, "lacks the metadata tokenizer.ggml.merges"),
        ({"merges": ["h i", "hi"]}, r"merges\[1\] is 'hi': it must be two tokens"),
        ({"merges": ["h nothing"]}, r"merges\[0\] is 'h nothing': it must be two tokens"),
        ({"merges": ["h h"]}, r"merges\[0\] is 'h h': it must be two tokens"),
        ({"merges": [1]}, "merges is .*: it must be a list of strings"),
        ({"model": 5}, "model is 5: it must be a string"),
        ({"pre": 5}, "pre is 5: it must be a string"),
        ({"token_type": [1]}, "token_type is .*: it must be a list of 320 numbers"),
        ({"add_bos_token": "no"}, "add_bos_token is 'no': it must be true or false"),
        ({**SENTENCEPIECE, "scores": None}, "lacks the metadata tokenizer.ggml.scores"),
        ({**SENTENCEPIECE, "scores": [1.0]}, "scores is .*: it must be a list of 320 numbers"),
        ({**SENTENCEPIECE, "unknown_token_id": 900}, "unknown_token_id is 900: it must be"),
        (
            {**SENTENCEPIECE, "scores": with_at(SCORES, 7, math.nan)},
            r"scores\[7\] is nan: it must",
        ),
        (
            {**SENTENCEPIECE, "scores": with_at(SCORES, 0, math.inf)},
            r"scores\[0\] is inf: it must",
        ),
        (
            {**SENTENCEPIECE, "scores": with_at(SCORES, 319, -math.inf)},
            r"scores\[319\] is -inf: it must",
        ),
        (
            {"scores": with_at(SCORES, 3, math.nan)},
            r"scores\[3\] is nan: it must be a finite number",
        ),
        (
            {**SENTENCEPIECE, "tokens": without(LLAMA, SPACE)},
            r"also holds '\u2581' \(U\+2581, the sp",
        ),
        (
            {**SENTENCEPIECE, "tokens": without(LLAMA, "<0x0A>")},
            r"also holds '<0x0A>' \(byte 0x0A\);",
        ),
        (
            {**SENTENCEPIECE, "tokens": ["<unk>", "<s>", "</s>", SPACE, *TOKENS[4:]]},
            r"holds '<0x00>' \(byte 0x00\), '<0x01>' \(byte 0x01\), '<0x02>' .*, and 253 more;",
        ),
        (
            {**SENTENCEPIECE, "tokens": [token.replace("0xA", "0xa") for token in LLAMA]},
            r"holds '<0xA0>' \(byte 0xA0\), '<0xA1>' .*, and 13 more;",
        ),
        *(
            ({"tokens": without(BYTE_LEVEL, token)}, rf"also holds '{token}' \(byte {byte}\);")
            for token, byte in {
                "a": "0x61",
                "Ġ": "0x20",
                "Ċ": "0x0A",
                "ĉ": "0x09",
                "Ã": "0xC3",
                "Ģ": "0x80",
                "ð": "0xF0",
            }.items()
        ),
        ({"tokens": TOKENS, "token_type": None}, r"holds 'ĉ' \(byte 0x09\), 'Ċ' .*, and 206 more;"),
        *(
            (
                {"token_type": with_at(TYPES, 5, kind)},
                rf"token_type\[5\] is {kind}: it must be one",
            )
            for kind in (9, -1, 0, 7)
        ),
        ({"token_type": [1.5] * 320}, r"token_type\[0\] is 1.5: it must be one"),
        ({"token_type": [True] * 320}, "token_type is .*: it must be a list of 320 numbers"),
        *(
            (
                {"token_type": kinds},
                r"token_type is .*: it must be 1 \(normal\) for at least one tok",
            )
            for kinds in ([3] * 320, [5] * 320, [3, 5] * 160, [2] * 320, [6] * 320, [4] * 320)
        ),
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


@pytest.mark.filterwarnings("ignore:.*is a part of ordinary text")  # letters stand for ends
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
    assert set(read_config(folder).ends()) == expected
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for place, text in texts.items():
        if place in ends:
            assert tokenizer(f"hi{text}").input_ids[-1] == at[place]
            assert tokenizer.decode([at[place]], skip_special_tokens=True) == ""


def test_b03_a_sentencepiece_vocabulary_that_names_no_ids(tokenizer_of, tmp_path):
    tokenizer = tokenizer_of(tokenizer=SENTENCEPIECE)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert read_config(resolve(tmp_path / "model.gguf")).ends() == (2,)
