"""Stop strings after thoughts: what a completion shows, however its text is cut into tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nv_api.answer_stops import AnswerStops
from nv_api.completion import Completion
from nv_api.detokenizer import ByteDetokenizer
from nv_api.said import Place, ThoughtScope
from nv_api.stopping import StopStrings
from nv_engine import SamplingParams

PARTS = ["<think>", "</think>", "<th", "ink>", "</", "\n", " ", "hm", "STOP", "ST", "OP", "k>S"]


def completion(place, **params):
    sampling = SamplingParams(max_tokens=None, **params).frozen()
    return Completion(0, sampling, ByteDetokenizer(lambda token: bytes([token])), place=place)


def said(text, place, *, size=1, ends="stop", **params):
    """The text, the reasons and the deltas of a completion that gets some bytes per step."""
    grown, deltas, data = completion(place, **params), "", text.encode()
    for start in range(0, len(data), size):
        grown.begin()
        is_last = start + size >= len(data)
        has_ended = grown.extend(list(data[start : start + size]), ends if is_last else None)
        grown.begun = None
        deltas += grown.delta().text
        if has_ended:
            break
    output = grown.output()
    assert output.text == deltas
    return output.text, output.finish_reason, output.stop_reason


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("place", "text", "shown"),
    [
        (None, "<think>a STOP</think>b", "<think>a "),
        (Place.BEFORE, "<think>a STOP</think>b STOP c", "<think>a STOP</think>b "),
        (Place.OPENED, "a STOP</think>b STOP c", "a STOP</think>b "),
        (Place.INSIDE, "a STOP</think>STOP c", "a STOP</think>"),
        (Place.AFTER, "a STOP</think>b", "a "),
        (Place.BEFORE, "a STOP<think>", "a "),
        (Place.BEFORE, " STOP<think>", " "),
        (Place.OPENED, "a ST</think>OP b STOP", "a ST</think>OP b "),
    ],
)
def test_s20_thoughts_are_not_searched_for_stop_strings(place, text, shown, size):
    assert said(text, place, size=size, ends="length", stop=["STOP"]) == (shown, "stop", "STOP")


@pytest.mark.parametrize("size", [1, 2, 100])
def test_s20_a_stop_string_that_spans_the_end_of_the_thought_is_not_one(size):
    for stop, rest in ("k>So", "So."), ("</think>", "So."), ("hm</think>S", "So."):
        text = f"<think>hm</think>{rest}"
        assert said(text, Place.BEFORE, size=size, stop=[stop], ends="length") == (
            text,
            "length",
            None,
        )


@pytest.mark.parametrize("size", [1, 100])
def test_a_text_that_might_have_begun_a_thought_is_searched_at_its_end(size):
    for text, shown in ("\n\n", ""), (" <thi", " "):
        stop = "\n" if text == "\n\n" else "<t"
        found = said(text, Place.BEFORE, size=size, stop=[stop], ends="length")
        assert found == (shown, "stop", stop)
    assert said(" <thi", Place.BEFORE, ends="length", stop=["x"])[0] == " <thi"


def test_the_tokens_end_with_the_stop_string():
    grown = completion(Place.OPENED, stop=["b"])
    assert not grown.extend(list(b"b</think>a"))
    assert grown.extend(list(b"abc"))
    assert bytes(grown.token_ids) == b"b</think>aab"


def test_an_interrupted_update_is_undone():
    grown = completion(Place.BEFORE, stop=["STOP"])
    for piece in (b"<thi", b"nk>STOP</thi", b"nk> S", b"TO"):
        grown.begin()
        grown.extend(list(piece) + list(b"</think>STOP"))
        grown.begin()
        assert not grown.extend(list(piece))
        grown.begun = None
    grown.begin()
    assert grown.extend(list(b"P"))
    assert grown.text == "<think>STOP</think> "


@given(st.lists(st.sampled_from(PARTS)), st.sampled_from(Place), st.integers(1, 9))
def test_the_text_shown_does_not_depend_on_the_cuts(parts, place, size):
    text = "".join(parts)
    scope = ThoughtScope(place)
    thought, rest = scope.push(text)
    rest += scope.finish().rest
    before, stop, _ = rest.partition("STOP")
    expected = (thought + before, "stop", "STOP") if stop else (text, "length", None)
    if text:
        assert said(text, place, size=size, ends="length", stop="STOP") == expected


@given(st.lists(st.sampled_from(PARTS)), st.lists(st.sampled_from(PARTS)), st.sampled_from(Place))
def test_an_earlier_state_undoes_the_pushes_since(first, second, place):
    search = AnswerStops(place, StopStrings(("STOP",)))
    for piece in first:
        if search.push(piece).stop:
            return
    state = search.state
    found = [[], []]
    for run in found:
        search.state = state
        run += [search.push(piece) for piece in second]
        run.append(search.flush())
    assert found[0] == found[1]
