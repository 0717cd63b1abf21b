"""TokenBound: the least number of tokens that a text can have, known before it is tokenized.

Owns which tokenizers have such a bound. Never tokenizes: that takes seconds and gigabytes for a
text that the context has no room for anyway.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nv_models.byte_level import BYTE_OF_CHARACTER, TEXT_CHARACTERS

from nv_api.word_bound import WordBound, word_bound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHRINKS = {
    "NFC": 4.0, "NFD": 4.0, "NFKC": 4.0, "NFKD": 4.0, "Lowercase": 3.0, "Prepend": 1.0,
    "ByteLevel": 1.0,
}  # fmt: skip
"""Normalizers, and at most how many bytes of a text become one: NFKC makes a letter of ASCII of a
mathematical one, which has four; NFC's most is 3.5 over all of Unicode."""
OF_SPACE = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Strip"}
"""Steps that remove white space and nothing else."""
KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
"""Steps that cut a text and keep all of it."""
PART_BYTES = 1 << 18


UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD", "ByteLevel"}
"""Normalizers that leave ASCII as it is."""
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Bytes of tokens are rounded up to these, so that a text is read once for each at most."""


class TokenBound:
    """The bound of one tokenizer: a token stands for no more bytes than the longest one has.

    Where no step changes a text, a byte counts more the shorter the longest token is that has it:
    with 1/length for each byte, no token counts more than 1, so a text has at least as many tokens
    as its bytes count. Runs of spaces or signs are often 100 bytes long, words 30.

    It needs a tokenizer that loses no text: each byte has a token, and no step removes anything but
    white space, which is then not counted. BERT's has a bound of its own (`word_bound.py`), and any
    other tokenizer has none: 0.

    Args:
        backend: the transformers tokenizer.
    """

    def __init__(self, backend: "PreTrainedTokenizerBase") -> None:
        self._skips_space = False
        self._shrink = 1.0
        self._longest = 0
        """Bytes of the longest token; 0 if texts have no bound."""
        self._groups: dict[int, bytes] = {}
        """The bytes whose longest token has so many bytes; empty if all count alike."""
        self._without_token = b""
        """Bytes of control characters that have no token, as in SmolLM2's; they are not counted."""
        self._words: WordBound | None = None
        rust: Any = getattr(backend, "backend_tokenizer", None)
        if rust is None:
            return
        normalizers, cuts = list(_steps(rust.normalizer)), list(_steps(rust.pre_tokenizer))
        kinds = {step["type"] for step in normalizers}
        self._words = word_bound(rust, kinds, {step["type"] for step in cuts})
        is_byte_level = any(step["type"] == "ByteLevel" for step in normalizers + cuts)
        if not _has_all_bytes(rust, is_byte_level):
            return
        if is_byte_level:
            pairs = BYTE_OF_CHARACTER.items()
            self._without_token = bytes(b for c, b in pairs if rust.token_to_id(c) is None)
        if all(map(self._note_normalizer, normalizers)) and all(map(self._note_cut, cuts)):
            self._longest = self._bytes_of_longest(rust, is_byte_level)
            if is_byte_level and kinds <= UNICODE_FORMS:
                self._groups = _groups(rust)

    def of(self, text: str) -> int:
        """The least number of tokens of a text; the special tokens around it are not counted."""
        if self._words is not None:
            return self._words.of(text)
        if not self._longest:
            return 0
        counted = ("".join(text.split()) if self._skips_space else text).encode()
        if self._without_token:
            counted = counted.translate(None, self._without_token)
        if not text.isascii():
            return int(len(counted) / (self._longest * self._shrink))
        if not self._groups:  # no form of Unicode changes ASCII
            return len(counted) // self._longest
        return int(sum(_num_of(some, counted) / length for length, some in self._groups.items()))

    def _note_normalizer(self, step: dict[str, Any]) -> bool:
        """Take in what a normalizer may remove; False if that has no bound."""
        kind = step["type"]
        if kind in OF_SPACE:
            self._skips_space = True
            return True
        if kind == "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            # One that shortens, or makes white space of something else, has no use in practice.
            return (
                pattern is not None
                and len(pattern.encode()) <= len(content.encode())
                and not any(map(str.isspace, content))
            )
        self._shrink *= SHRINKS.get(kind, 1.0)
        return kind in SHRINKS

    def _note_cut(self, step: dict[str, Any]) -> bool:
        """Take in what a step that cuts the text may remove; False if that has no bound."""
        if step["type"] in OF_SPACE:
            self._skips_space = True
            return True
        return step["type"] in KEEPING or step.get("behavior", "Removed") != "Removed"

    def _bytes_of_longest(self, rust: Any, is_byte_level: bool) -> int:  # noqa: ANN401  # untyped
        """Of the vocabulary and the added tokens, which also may take white space around them."""
        vocabulary = rust.get_vocab(with_added_tokens=False)
        sizes = [len(token) if is_byte_level else len(token.encode()) for token in vocabulary]
        for token in rust.get_added_tokens_decoder().values():
            self._skips_space |= token.lstrip or token.rstrip
            sizes.append(len(token.content.encode()))
            if token.normalized and rust.normalizer is not None:
                sizes.append(len(rust.normalizer.normalize_str(token.content).encode()))
        return max(sizes, default=0)


def _groups(rust: Any) -> dict[int, bytes]:  # noqa: ANN401  # untyped
    """The bytes of ASCII by the length of the longest token that has them, rounded up."""
    longest = dict.fromkeys(range(0x80), 1)
    tokens = [bytes(BYTE_OF_CHARACTER[letter] for letter in each) for each in _plain_tokens(rust)]
    tokens += [token.content.encode() for token in rust.get_added_tokens_decoder().values()]
    for token in tokens:
        for byte in set(token):
            longest[byte] = max(longest.get(byte, 1), len(token))
    groups: dict[int, list[int]] = {}
    for byte in range(0x80):
        length = next((each for each in LENGTHS if each >= longest[byte]), longest[byte])
        groups.setdefault(length, []).append(byte)
    return {length: bytes(some) for length, some in groups.items()}


def _plain_tokens(rust: Any) -> Iterator[str]:  # noqa: ANN401  # untyped
    """The tokens of a byte-level vocabulary that are written as its bytes."""
    for token in rust.get_vocab(with_added_tokens=False):
        if all(letter in BYTE_OF_CHARACTER for letter in token):
            yield token


def _num_of(some: bytes, text: bytes) -> int:
    """How many bytes of a text are some of these; in parts, as other threads wait for each."""
    parts = (text[at : at + PART_BYTES] for at in range(0, len(text), PART_BYTES))
    return len(text) - sum(len(part.translate(None, some)) for part in parts)


def _steps(whole: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401  # the library has no type for both
    """The settings of a normalizer or pre-tokenizer, one step after the other."""
    waiting = [] if whole is None else [json.loads(whole.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step.get("normalizers", ()), *step.get("pretokenizers", ()), *waiting]
        else:
            yield step


def _has_all_bytes(rust: Any, is_byte_level: bool) -> bool:  # noqa: ANN401  # untyped
    """Whether no character of plain text is lost, or joins its neighbours in an unknown token."""
    if type(rust.model).__name__ not in {"BPE", "Unigram"}:
        return False
    if is_byte_level:
        return all(rust.token_to_id(letter) is not None for letter in TEXT_CHARACTERS.values())
    names = (f"<0x{byte:02X}>" for byte in range(256))
    falls_back = bool(getattr(rust.model, "byte_fallback", False))
    return falls_back and all(rust.token_to_id(name) is not None for name in names)
