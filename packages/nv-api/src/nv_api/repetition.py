"""Repetition: whether a text ends with many copies of one piece, as that of a stuck model does.

Owns the bounds between that and a text that repeats on purpose: the lines of a list differ, and
indented code, tables and drawings repeat only for a short time.
"""

NUM_COPIES = 4
"""Copies in a row that are a repetition."""
NUM_CHARACTERS = 400
"""Least number of characters of these copies together: about eighty words."""
NUM_CHARACTERS_DRAWN = 800
"""The same for a piece of digits and signs: an empty board of 8 x 8 fields has 600."""
LONGEST_PIECE = 600
"""Characters of the longest piece that is searched for: a paragraph."""


def repeated_end(text: str) -> int:
    """Number of characters at the end of a text that repeat those before them; 0 if none do.

    A text repeats itself if it ends with at least `NUM_COPIES` copies in a row of one piece, of at
    most `LONGEST_PIECE` characters, which together have at least `NUM_CHARACTERS` characters, or
    `NUM_CHARACTERS_DRAWN` if the piece is digits and signs. The first copy is not in the result.
    """
    for length in range(1, min(LONGEST_PIECE, len(text) // NUM_COPIES) + 1):
        if text[-1] != text[-1 - length]:  # nearly always, and much faster than the rest
            continue
        least = NUM_CHARACTERS_DRAWN if _is_drawn(text[-length:]) else NUM_CHARACTERS
        end = text[-max(least, length * NUM_COPIES) :]
        if len(text) >= least and end[length:] == end[:-length]:
            return _num_repeated(text, length)
    return 0


def _is_drawn(piece: str) -> bool:
    return not piece.isspace() and not any(map(str.isalpha, piece))


def _num_repeated(text: str, length: int) -> int:
    """Characters at the end that equal those a length before them."""
    count = 0
    while count + length < len(text) and text[-1 - count] == text[-1 - count - length]:
        count += 1
    return count
