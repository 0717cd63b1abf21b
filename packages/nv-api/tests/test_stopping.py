from hypothesis import given
from hypothesis import strategies as st
from nv_api.stopping import StopStrings

words = st.text("ab", min_size=1, max_size=4)


def first_end(text, stops):
    """The definition: read letter by letter; the first stop string that is complete ends it."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return end, max(done, key=len)
    return None


def run(stops, pieces, **kwargs):
    """What was shown after each piece, and the stop string found."""
    search, shown = StopStrings(tuple(stops), **kwargs), []
    for piece in pieces:
        text, stop = search.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, search.flush()], None


@given(stops=st.lists(words, min_size=1, max_size=3), pieces=st.lists(st.text("abc", max_size=5)))
def test_the_text_ends_where_the_definition_says(stops, pieces):
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
