"""The least number of tokens of a text, and what is refused by it."""

import random
import time
from copy import deepcopy

import pytest
from nv_api.prompts import Prompt, PromptTooLong, tokenize
from nv_api.tokenizer import Tokenizer
from nv_models.byte_level import BYTE_OF_CHARACTER
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BaseTokenizer
from transformers import PreTrainedTokenizerFast

PIECES = [
    "hello",
    " ",
    "\n",
    "K",
    "\u212a",
    "e\u0301",
    "\u1fd3",
    "日本",
    "🙂",
    "<think>",
    "\U0001d400",
    "a\u200d",
]
NORMALIZERS = {
    "none": None,
    "nfc": normalizers.NFC(),
    "nfkc": normalizers.NFKC(),
    "lower": normalizers.Sequence(
        [normalizers.NFD(), normalizers.Lowercase(), normalizers.Strip()]
    ),
    "replace": normalizers.Replace(" ", "▁"),
}


def changed(backend, normalizer=None, model=None, cut=None, token=None):
    """A tokenizer with another step."""
    backend = deepcopy(backend)
    rust = backend.backend_tokenizer
    rust.normalizer = normalizer
    if model is not None:
        rust.model = model
    if cut is not None:
        rust.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel()])
    if token is not None:
        rust.add_tokens([token])
    return Tokenizer(backend)


def check(tokenizer):
    draw = random.Random(3)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(0, 40))) for _ in range(40)]
    texts += [piece * 200 for piece in PIECES] + [f"a{' ' * 999}<s>{' ' * 999}a"]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokenizer.bound.of(text) <= len(ids), text[:20]
    assert tokenizer.bound.of("abc" * 999) > 100


@pytest.mark.parametrize("name", NORMALIZERS)
def test_no_text_has_fewer_tokens_than_its_bound(byte_level, sentence_piece, name):
    check(changed(byte_level, NORMALIZERS[name]))
    check(changed(sentence_piece, NORMALIZERS[name]))


def test_16_a_letter_that_is_replaced_does_not_count_by_its_own_tokens(byte_level):
    run = AddedToken("▁" * 32, special=False, normalized=True)
    tokenizer = changed(byte_level, NORMALIZERS["replace"], token=run)
    (ids,) = tokenizer.encode([" " * 320])
    assert tokenizer.bound.of(" " * 320) <= len(ids) == 10


def test_white_space_that_may_be_removed_is_not_counted(byte_level):
    check(changed(byte_level, token=AddedToken("<s>", lstrip=True, rstrip=True)))
    check(changed(byte_level, cut=pre_tokenizers.WhitespaceSplit()))


def test_a_byte_counts_by_the_longest_token_that_has_it(byte_level):
    run = AddedToken("=" * 96, special=False, normalized=False)
    tokenizer = changed(byte_level, token=run)
    check(tokenizer)
    assert tokenizer.bound.of("=" * 960) == len(tokenizer.encode(["=" * 960])[0]) == 10
    assert tokenizer.bound.of("B" * 960) == len(tokenizer.encode(["B" * 960])[0]) == 960
    assert tokenizer.bound.of("a" * 960) == 80, "<|im_start|> has one"
    assert tokenizer.bound.of("=" * 96 + "AB" * 100) == 201
    nfc = changed(byte_level, normalizers.NFC(), token=run)
    assert nfc.bound.of("B" * 960) == 960
    assert nfc.bound.of("é" * 960) == 2 * 960 // (96 * 4), "NFC may join bytes of such a text"


WORDS = ["hello", "##lo", "he", "a", "##b", "1", ",", "[", "]", "_", "日", "é", "e"]
BERT_PIECES = [
    *("hello", "heb", " ", "\n", "x" * 150, ",", "[MASK]", "a_b", "日本", "e\u0301", "\x0c"),
    *("\u3000", "\x00", "\xad", "a1", "\u2028", "[", "\ufffd"),
]


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_bert_tokenizer_has_at_least_a_token_for_each_word_and_sign(lowercase):
    tokens = ["[UNK]", "[MASK]", *WORDS]
    model = models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]")
    rust = BaseTokenizer(model)
    rust.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.add_special_tokens(["[MASK]"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="[UNK]"))
    draw = random.Random(5)
    texts = ["".join(draw.choices(BERT_PIECES, k=draw.randint(0, 40))) for _ in range(60)]
    texts += [piece * 200 for piece in BERT_PIECES]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokenizer.bound.of(text) <= len(ids), text[:20]
    assert tokenizer.bound.of("hello " * 999) == 333, "[MASK] has two signs and a word"
    assert tokenizer.bound.of("," * 999) == 333
    assert tokenizer.bound.of("a" * 999) == 0, "a long word that it lacks is one token"
    started = time.process_time()
    with pytest.raises(PromptTooLong):
        tokenize([Prompt("hello world " * 10**6, None)], tokenizer, 512)
    assert time.process_time() - started < 1


LOSSES = [
    {"normalizer": normalizers.Replace(Regex("b+"), "")},
    {"normalizer": normalizers.Replace("bbbb", "a")},
    {"normalizer": normalizers.StripAccents()},
    {"cut": pre_tokenizers.Split("b", "removed")},
    {"model": models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")},
]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_tokenizer_that_may_lose_text_has_no_bound(byte_level, loss):
    assert changed(byte_level, **loss).bound.of("b" * 9999) == 0


def without(backend, byte):
    """A BPE of the same letters but that of a byte, without merges."""
    letters = {letter: i for i, letter in enumerate(sorted(BYTE_OF_CHARACTER))}
    (lost,) = (letter for letter, value in BYTE_OF_CHARACTER.items() if value == byte)
    del letters[lost]
    return changed(backend, model=models.BPE(letters, []))


def test_a_control_character_without_a_token_is_not_counted(byte_level):
    tokenizer = without(byte_level, 0x04)
    check(tokenizer)
    text = "b" * 999 + "\x04" * 99999
    assert 0 < tokenizer.bound.of(text) <= len(tokenizer.encode([text])[0]) == 999
    assert without(byte_level, ord("b")).bound.of(text) == 0


def test_unknown_characters_that_become_one_token_have_no_bound(sentence_piece):
    backend = deepcopy(sentence_piece)
    backend.backend_tokenizer.model.byte_fallback = False
    assert Tokenizer(backend).bound.of("b" * 9999) == 0


def test_a_text_far_over_the_context_is_refused_before_it_is_tokenized(byte_level, monkeypatch):
    tokenizer = Tokenizer(byte_level)
    monkeypatch.setattr(tokenizer, "encode", None)
    started = time.process_time()
    with pytest.raises(PromptTooLong, match=r"at least 416666 tokens and .* 512 tokens"):
        tokenize([Prompt("a" * 5_000_000, None)], tokenizer, 512)
    assert time.process_time() - started < 1


def test_a_text_that_may_fit_and_one_that_is_truncated_are_tokenized(byte_level):
    tokenizer = Tokenizer(byte_level)
    assert len(tokenize([Prompt("a" * 600, None)], tokenizer, 512)[0].token_ids) == 600
    assert len(tokenize([Prompt("a" * 9000, None)], tokenizer)[0].token_ids) == 9000
