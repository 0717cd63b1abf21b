"""WordBound: the least number of tokens that a text has for a BERT tokenizer (WordPiece).

Such a tokenizer loses text: a word that it lacks is one token, however long. But it cuts first, at
white space and around each sign, and joins nothing again.

Owns the count of words and signs of ASCII. Never tokenizes.
"""

import string
from typing import Any

SIGNS = string.punctuation.encode()
_CONTROLS = bytes(code for code in range(0x80) if code < 0x20 or code == 0x7F)
REMOVED = _CONTROLS.translate(None, b"\t\n\r")
"""Control characters are removed, so they part no words."""
_LETTERS = (string.ascii_letters + string.digits).encode()
SHAPE = bytes(ord("x") if code in _LETTERS else ord(" ") for code in range(0x100))
"""Letters and digits as x, all else as a space."""


class WordBound:
    """The bound of one tokenizer that cuts as BERT's does.

    Args:
        added: its added tokens, which may hold several words and signs.
    """

    def __init__(self, added: list[str]) -> None:
        self._most = max(map(_count, added), default=1) or 1

    def of(self, text: str) -> int:
        """The least number of tokens of a text."""
        return _count(text) // self._most


def word_bound(rust: Any, normalizers: set[str], cuts: set[str]) -> WordBound | None:  # noqa: ANN401
    """The bound of a tokenizer; None if it cuts in another way.

    Args:
        rust: the tokenizer.
        normalizers: the kinds of its steps that change the text.
        cuts: of those that cut it.
    """
    is_bert = type(rust.model).__name__ == "WordPiece" and cuts == {"BertPreTokenizer"}
    if not is_bert or not normalizers <= {"BertNormalizer", "Lowercase", "NFC", "NFD"}:
        return None
    return WordBound([token.content for token in rust.get_added_tokens_decoder().values()])


def _count(text: str) -> int:
    """The signs of ASCII, and the runs of its letters and digits between them and white space."""
    known = text.encode("ascii", "ignore").translate(None, REMOVED)
    num_signs = len(known) - len(known.translate(None, SIGNS))
    return num_signs + (b" " + known.translate(SHAPE)).count(b" x")
