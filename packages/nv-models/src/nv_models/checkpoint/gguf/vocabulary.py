"""The vocabulary of a GGUF file: its tokens by id, and their types and scores.

Owns the checks that every text can be cut into tokens, and the warnings of oddities that llama.cpp
accepts. Never builds a tokenizer.
"""

import math

from nv_models.byte_level import TEXT_CHARACTERS
from nv_models.checkpoint.gguf.ends import end_doubts
from nv_models.checkpoint.gguf.header import Header
from nv_models.checkpoint.gguf.section import Section, is_integer
from nv_models.listing import first_few

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6  # token types
TYPES = {
    NORMAL: "normal",
    2: "unknown",
    CONTROL: "control",
    USER_DEFINED: "user-defined",
    5: "unused",
    BYTE: "byte",
}
SPACE = "\u2581"
"""SentencePiece writes it for a space."""
UNNAMED = "default"
"""The way to cut text into words of a file that names none."""


def token_list(values: Section, num_rows: int) -> list[str]:
    """The tokens, by id: one for each of the embedding's `num_rows` rows, no two alike.

    An empty token gets a name, as in llama.cpp.

    Raises:
        ValueError: another number of tokens, two that are alike, an unknown type, or a score that
            is not finite.
    """
    tokens = values.texts("tokens")
    if len(tokens) != num_rows:
        raise values.error("tokens", tokens, f"{num_rows} strings, one per row of token_embd")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    places: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if places.setdefault(token, index) != index:
            expected = f"another token than tokens[{places[token]}]"
            raise values.error(f"tokens[{index}]", token, expected)
    check_scores(values, len(tokens))
    check_types(values, len(tokens))
    return tokens


def check_scores(values: Section, count: int) -> None:
    """Raise ValueError for a score that is not a finite number."""
    if values.value("scores") is None:
        return
    for index, score in enumerate(values.numbers("scores", count)):
        if not math.isfinite(score):
            raise values.error(f"scores[{index}]", score, "a finite number")


def check_types(values: Section, count: int) -> None:
    """Raise ValueError for an unknown type, and where no token is normal."""
    kinds = token_types(values, count)
    for index, kind in enumerate(kinds):
        if not is_integer(kind) or kind not in TYPES:
            known = ", ".join(f"{number} ({name})" for number, name in TYPES.items())
            raise values.error(f"token_type[{index}]", kind, f"one of {known}")
    if NORMAL not in kinds:
        expected = f"{NORMAL} (normal) for at least one token, or no text can be cut into tokens"
        raise values.error("token_type", kinds, expected)


def token_types(values: Section, count: int) -> list[float]:
    """The type of each token; all are normal where the file does not give types."""
    given = values.value("token_type")
    return [NORMAL] * count if given is None else values.numbers("token_type", count)


def byte_tokens(kind: str) -> dict[int, str]:
    """The token of each byte of text that a vocabulary of this kind must have."""
    if kind == "llama":
        return {byte: f"<0x{byte:02X}>" for byte in range(0x100)}
    return TEXT_CHARACTERS


def check_letters(values: Section, vocabulary: frozenset[str]) -> None:
    """Raise ValueError where a byte or a space has no token: it would vanish from a text."""
    kind = values.text("model")
    lost = [(byte, token) for byte, token in byte_tokens(kind).items() if token not in vocabulary]
    tokens = values.texts("tokens")
    if lost:
        named = ", ".join(first_few([f"{token!r} (byte 0x{byte:02X})" for byte, token in lost]))
        raise values.error("tokens", tokens, f"a list that also holds {named}")
    if kind == "llama" and SPACE not in vocabulary:
        expected = f"a list that also holds {SPACE!r} (U+2581, the space)"
        raise values.error("tokens", tokens, expected)


def doubts(header: Header, num_rows: int) -> list[str]:
    """The oddities of a vocabulary that can be used as it is, one sentence each.

    Raises:
        ValueError: `vocab_size` of the architecture is not a positive integer.
    """
    values = Section(header, "tokenizer.ggml")
    tokens = values.texts("tokens")
    found: list[str] = []
    if empty := [f"tokens[{index}]" for index, token in enumerate(tokens) if not token]:
        found.append(
            f"{values.name}: {', '.join(first_few(empty))} is an empty text, which no text is cut "
            "into; convert the file again if the model has a text for it"
        )
    sizes = Section(header, header.architecture)
    if (stated := sizes.size("vocab_size", num_rows)) != num_rows:
        found.append(
            f"{sizes.name}.vocab_size is {stated}, and there are {num_rows} tokens and rows of "
            f"token_embd.weight: {num_rows} is used; convert the file again if that is wrong"
        )
    kind = values.text("model")
    if kind != "llama" and values.value("bos_token_id") is None and values.value("add_bos_token"):
        found.append(
            f"{values.name}.add_bos_token is true, and there is no bos_token_id: texts begin "
            "without one; convert the file again"
        )
    if kind == "gpt2" and (pre := values.text("pre", "")) in ("", UNNAMED):
        found.append(
            f"{values.name}.pre is {repr(pre) if pre else 'missing'}, so that the way in which the "
            "model's texts are cut into words is not known: they are cut as llama.cpp does then, "
            "which may give other tokens than the model knows; convert the file again, or pass "
            "tokenizer=, the folder or hub name of the original model"
        )
    letters = [*byte_tokens(kind).values(), SPACE]
    kinds = dict(zip(tokens, token_types(values, len(tokens)), strict=True))
    if hidden := [repr(token) for token in letters if kinds.get(token) == CONTROL]:
        found.append(
            f"{values.name}.token_type of {', '.join(first_few(hidden))} is {CONTROL} (control), "
            f"so that these are left out of texts: it should be {NORMAL} (normal) or {BYTE} "
            "(byte); convert the file again"
        )
    return [f"{header.file}: {sentence}" for sentence in (*found, *end_doubts(values))]
