"""Stop strings: the search in a text, and in the tokens of a completion."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nv_api.completion import Completion
from nv_api.said import Place
from nv_api.stopping import StopStrings
from nv_api.tokenizer import Tokenizer
from nv_engine import SamplingParams, TokenLogprobs

words = st.text("ab", min_size=1, max_size=4)


def first_end(text, stops):
    """The definition: read letter by letter; the first stop string that is complete ends it."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return end, max(done, key=len)
    return None


def run(stops, pieces, **kwargs):
    """The text shown after each piece, and the stop string found."""
    search, shown = StopStrings(tuple(stops), **kwargs), []
    for piece in pieces:
        text, stop = search.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, search.flush().text], None


@given(stops=st.lists(words, min_size=1, max_size=3), pieces=st.lists(st.text("abc", max_size=5)))
def test_the_text_ends_where_the_definition_ends_it(stops, pieces):
    text = "".join(pieces)
    expected = first_end(text, stops)
    cut, cut_stop = run(stops, pieces)
    kept, kept_stop = run(stops, pieces, include=True)
    if expected is None:
        assert ("".join(cut), cut_stop) == ("".join(kept), kept_stop) == (text, None)
    else:
        end, stop = expected
        assert ("".join(cut), cut_stop) == (text[: end - len(stop)], stop)
        assert ("".join(kept), kept_stop) == (text[:end], stop)


@given(stops=st.lists(words, min_size=1, max_size=3), text=st.text("abc", max_size=12))
def test_what_is_shown_is_never_part_of_a_stop_to_come(stops, text):
    shown = ""
    search = StopStrings(tuple(stops))
    for i, letter in enumerate(text):
        shown += search.push(letter).text
        expected = first_end(text, stops)
        if expected is not None and i + 1 >= expected[0]:
            break
        if expected is not None:
            assert len(shown) <= expected[0] - len(expected[1])


def test_text_that_turns_out_harmless_is_shown_at_once():
    search = StopStrings(("STOP",))
    assert [search.push(letter).text for letter in "aSTx"] == ["a", "", "", "STx"]


def test_a_stop_string_does_not_end_where_it_is_not_armed_and_may_begin_there():
    search = StopStrings(("ab",))
    assert search.push("aba", armed=False) == ("ab", None)
    assert search.push("b") == ("", "ab")


def test_of_two_that_end_together_the_longer_is_the_one():
    assert StopStrings(("b", "ab")).push("xab") == ("x", "ab")


def test_what_was_complete_before_it_was_armed_is_text():
    """Also where it is held back, because a longer one begins with it."""
    search = StopStrings(("ab", "abc"))
    assert search.push("ab", armed=False) == ("", None)
    assert search.push("x") == ("abx", None)
    search = StopStrings(("ab", "abc"))
    search.push("ab", armed=False)
    assert search.push("c") == ("", "abc")


def test_a_piece_in_which_no_stop_string_begins_is_not_searched(monkeypatch):
    """Most pieces are of this kind, and there is one per token."""
    search = StopStrings(("ab", "ba"))
    monkeypatch.setattr(search, "_undecided", None)
    assert search.push("xyz") == ("xyz", None)
    with pytest.raises(TypeError):
        search.push("xa")


@given(
    stops=st.lists(words, min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=5), max_size=6),
    num_unarmed=st.integers(0, 4),
)
def test_the_first_that_ends_while_armed(stops, pieces, num_unarmed):
    search, shown, found = StopStrings(tuple(stops)), "", None
    for index, piece in enumerate(pieces):
        text, found = search.push(piece, armed=index >= num_unarmed)
        shown += text
        if found is not None:
            break
    else:
        shown += search.flush().text
    text, unarmed = "".join(pieces), len("".join(pieces[:num_unarmed]))
    ends = [
        (end, max((stop for stop in stops if text[:end].endswith(stop)), key=len))
        for end in range(unarmed + 1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops)
    ]
    end, expected = ends[0] if ends else (len(text), None)
    assert found == expected
    assert shown == text[: end - len(expected or "")]


def read_in(parts, params, place, ids, tokenizer):
    """A completion that gets these tokens in parts, and the deltas that it gave meanwhile."""
    completion = Completion(
        0, params, tokenizer.detokenizer(params, []), tokenizer.token_text, place
    )
    deltas, at = [], 0
    for size in parts:
        part = ids[at : at + size]
        at += size
        logprobs = [TokenLogprobs([token], [-float(token)], 1) for token in part]
        completion.begin()
        ended = completion.extend(part, None, None, logprobs)
        completion.begun = None
        deltas.append(completion.delta())
        if ended:
            break
    if completion.finish_reason is None:
        completion.finish("length")
        deltas.append(completion.delta())
    return completion.output(), deltas


@pytest.mark.parametrize("place", [None, Place.BEFORE, Place.INSIDE])
@pytest.mark.parametrize("seed", range(8))
def test_a_burst_of_tokens_stops_where_single_tokens_do(byte_level, place, seed):
    """Tokens after the one that completes a stop string are dropped, in bursts of any sizes."""
    rng, tokenizer = random.Random(seed), Tokenizer(byte_level)
    words = ["ST", "STOP", "a", "é🙂", "</think>", "<think>", "\n", "S", "T", "OP"]
    text = ("<think>" if place is Place.BEFORE else "") + "".join(rng.choices(words, k=30))
    ids = tokenizer.encode([text], add_special_tokens=False)[0]
    stops = rng.sample(["ST", "STOP", "🙂a", "k>S", "TT", "\n\n"], 2)
    params = SamplingParams(
        stop=stops, min_tokens=rng.choice([0, 5]), max_tokens=999, logprobs=0,
        include_stop_str_in_output=rng.random() < 0.5,
    )  # fmt: skip
    one, _ = read_in([1] * len(ids), params, place, ids, tokenizer)
    for _ in range(6):
        sizes = rng.choices([1, 2, 3, 7, 40], k=len(ids))
        burst, deltas = read_in(sizes, params, place, ids, tokenizer)
        for name in ("text", "token_ids", "finish_reason", "stop_reason", "cumulative_logprob"):
            assert getattr(burst, name) == getattr(one, name), name
        assert "".join(delta.text for delta in deltas) == one.text
        assert [token for delta in deltas for token in delta.token_ids] == one.token_ids
        assert [each for delta in deltas for each in delta.logprobs] == list(one.logprobs)
