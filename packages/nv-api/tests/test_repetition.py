import pytest
from nv_api.repetition import repeated_end

PARAGRAPH = (
    "Paris is the capital of France. It lies on the Seine, has two million inhabitants, and is "
    "known for its museums, its bridges and its bread.\n\n"
)


@pytest.mark.parametrize(
    ("piece", "copies"),
    [
        ("la ", 134),
        ("the the of ", 40),
        ("The capital of France is Paris.\n", 14),
        (PARAGRAPH, 4),
        ("\n", 400),
        ("法国的首都是巴黎。", 45),
        ("1. ", 267),
        ("9", 800),
    ],
)
def test_a_text_that_repeats_itself(piece, copies):
    text = "Listen?" + piece * copies
    surplus = repeated_end(text)
    assert text[:-surplus] == "Listen?" + piece
    assert repeated_end(text + piece[: len(piece) // 2]) >= surplus
    assert repeated_end(text + " And then it ended.") == 0


CODE = "for i in range(9):\n" + "".join(
    f"{' ' * 4 * depth}if grid[{depth}] == {depth}:\n" for depth in range(1, 9)
)
TABLE = "| name | age |\n|------|-----|\n" + "".join(f"| Ann{i} | {i} |\n" for i in range(40))
BOARD = ("+---" * 8 + "+\n" + "|   " * 8 + "|\n") * 8
MATRIX = ("0 " * 16 + "\n") * 16
LIST = "".join(f"{i}. Item number {i}\n" for i in range(1, 60))
SONG = "Na na na na na na na na, Batman!\n" * 8 + "Hey!\n"
ROWS = "    (NULL, NULL, 0),\n" * 16


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "ha" * 60,
        CODE,
        CODE * 3,
        TABLE,
        BOARD,
        MATRIX,
        LIST,
        SONG,
        ROWS,
        "=" * 79,
        PARAGRAPH * 3,
    ],
)
def test_a_text_that_repeats_on_purpose(text):
    assert not any(repeated_end(text[:end]) for end in range(len(text) + 1))
