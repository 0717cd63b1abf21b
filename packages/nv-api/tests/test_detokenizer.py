from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nv_api.detokenizer import WindowDetokenizer
from nv_api.tokenizer import Tokenizer
from nv_engine import SamplingParams

TEXTS = [
    "plain words",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 family 🎉",
    "a\u0301 e\u0301",
    "\n\t  spaces  ",
]


def pieces_of(tokenizer, ids, cuts, params=None, prompt=()):
    """The text of each chunk of ids, and of the flush."""
    detokenizer = tokenizer.detokenizer(params or SamplingParams(), list(prompt))
    edges = [0, *sorted(cuts), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
    return [*pieces, detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 263)), cuts=st.sets(st.integers(0, 20)))
def test_pieces_joined_are_what_the_tokenizer_decodes(byte_level, ids, cuts):
    cuts = [cut for cut in cuts if cut <= len(ids)]
    joined = "".join(pieces_of(Tokenizer(byte_level), ids, cuts))
    assert joined == byte_level.decode(ids, skip_special_tokens=True)


@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_no_piece_holds_a_part_of_a_character(kind, text, request):
    backend = request.getfixturevalue(kind)
    tokenizer = Tokenizer(backend)
    (ids,) = tokenizer.encode([text], add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids, range(1, len(ids)))
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == backend.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_a_character_appears_with_its_last_token(kind, text, request):
    tokenizer = Tokenizer(request.getfixturevalue(kind))
    (ids,) = tokenizer.encode([text], add_special_tokens=False)
    for end in range(len(ids)):
        shown = "".join(pieces_of(tokenizer, ids[:end], range(1, end))[:-1])
        assert text.startswith(shown) or text.lstrip(" ").startswith(shown)


def test_special_tokens_are_left_out_unless_asked_for(byte_level):
    tokenizer = Tokenizer(byte_level)
    (ids,) = tokenizer.encode(["a<|im_end|>b<think>日本"], add_special_tokens=False)
    asked = SamplingParams(skip_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids, ())) == "ab<think>日本"
    assert "".join(pieces_of(tokenizer, ids, (), asked)) == "a<|im_end|>b<think>日本"


def test_ids_past_the_vocabulary_have_no_text(byte_level):
    assert "".join(pieces_of(Tokenizer(byte_level), [64, 100_000, 65], ())) == byte_level.decode(
        [64, 65]
    )


def test_a_character_cut_short_becomes_a_replacement_only_at_the_end(byte_level):
    tokenizer = Tokenizer(byte_level)
    (ids,) = tokenizer.encode(["é"], add_special_tokens=False)
    assert pieces_of(tokenizer, ids[:1], ()) == ["", "\ufffd"]


def test_the_prompt_decides_about_a_leading_space(sentence_piece):
    tokenizer = Tokenizer(sentence_piece)
    hello, world = sentence_piece.convert_tokens_to_ids(["▁hello", "▁world"])
    assert "".join(pieces_of(tokenizer, [world], ())) == "world"
    assert "".join(pieces_of(tokenizer, [world], (), prompt=[hello])) == " world"


def test_bytes_that_never_make_a_character_do_not_wait_for_ever(sentence_piece):
    tokenizer = Tokenizer(sentence_piece)
    broken = sentence_piece.convert_tokens_to_ids("<0xFF>")
    detokenizer = tokenizer.detokenizer(SamplingParams(), [])
    pieces = [detokenizer.push([broken]) for _ in range(100)]
    assert "".join(pieces[:9]) == "\ufffd" * 8
    assert len("".join(pieces)) >= 90


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind, request, monkeypatch):
    backend = request.getfixturevalue(kind)
    lengths = []
    decode = type(backend).decode
    monkeypatch.setattr(
        type(backend),
        "decode",
        lambda self, ids, **kw: (lengths.append(len(ids)), decode(self, ids, **kw))[1],
    )
    tokenizer = Tokenizer(backend)
    (ids,) = tokenizer.encode(["hello 日本 " * 100], add_special_tokens=False)
    pieces_of(tokenizer, ids, range(1, len(ids)))
    assert max(lengths, default=0) <= 20


def test_a_prompt_that_ends_in_bytes_does_not_spoil_the_first_character(sentence_piece):
    tokenizer = Tokenizer(sentence_piece)
    prompt, ids = tokenizer.encode(["日本", "語"], add_special_tokens=False)
    ids = [token for token in ids if sentence_piece.convert_ids_to_tokens(token) != "▁"]
    assert "".join(pieces_of(tokenizer, ids, range(1, len(ids)), prompt=prompt)) == "語"


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_the_flush_gives_what_still_waits(kind, request):
    """A detokenizer whose flush gives nothing loses the end of a text that is cut short."""
    tokenizer = Tokenizer(request.getfixturevalue(kind))
    (ids,) = tokenizer.encode(["é"], add_special_tokens=False)
    *shown, last = pieces_of(tokenizer, ids[:1], ())
    assert (shown, last) == ([""], "\ufffd")


def test_a_token_is_decoded_after_those_before_it(sentence_piece):
    """Without context every word would be the first of a text, and begin without its space."""
    tokenizer = Tokenizer(sentence_piece)
    hello, world = sentence_piece.convert_tokens_to_ids(["▁hello", "▁world"])
    ids = [world, hello, world, hello]
    pieces = pieces_of(tokenizer, ids, range(1, len(ids)), prompt=[hello])
    assert pieces == [" world", " hello", " world", " hello", ""]


def test_the_context_of_a_long_prompt_is_a_few_of_its_tokens(sentence_piece, monkeypatch):
    lengths = []
    decode = type(sentence_piece).decode
    monkeypatch.setattr(
        type(sentence_piece),
        "decode",
        lambda self, ids, **kw: (lengths.append(len(ids)), decode(self, ids, **kw))[1],
    )
    hello, world = sentence_piece.convert_tokens_to_ids(["▁hello", "▁world"])
    pieces_of(Tokenizer(sentence_piece), [world], (), prompt=[hello] * 1000)
    assert 0 < min(lengths) <= max(lengths) <= 20


def of_bytes(ids):
    """As SentencePiece's byte fallback: a run of bytes is text as a whole, or not at all."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


@pytest.mark.parametrize("first", range(4))
def test_16_a_context_that_begins_within_a_character_does_not_break_the_next(first):
    prompt = list("🎉é".encode())[first:]
    detokenizer = WindowDetokenizer(of_bytes, lambda token: True, prompt)
    assert detokenizer.push("é".encode()) + detokenizer.flush() == "é"


def test_16_an_earlier_state_knows_nothing_of_the_tokens_since():
    detokenizer = WindowDetokenizer(of_bytes, lambda token: True)
    first, second = "é".encode()
    assert detokenizer.push([first]) == ""
    before = detokenizer.state
    assert detokenizer.push([first]) == ""
    detokenizer.state = before
    assert detokenizer.push([second]) == "é"
