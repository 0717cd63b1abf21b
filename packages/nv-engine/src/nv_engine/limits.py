"""Limits: how much one request's parameters may take on the device, and of the host's time.

Owns the bounds and their sentences. What a list costs stands beside its bound: a table on the
device has a row for each slot, so that one request's list is paid for by all.
"""

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Protocol

MAX_STOPS = 256
"""Stop strings: each is looked for in each piece of text."""
MAX_CHARACTERS = 1024
"""Of a stop string, which text is held back for, or of a bad word."""
MAX_STOP_IDS = 4096
"""8 bytes each in a row."""
MAX_BIASES = 32768
"""12 bytes each in a row: less than what penalties take."""
MAX_BAD_WORDS = 2048
MAX_BAD_WORD_TOKENS = 64
"""Each word takes 8 bytes per token of the longest word in a row: 1 MiB at most."""
MAX_LOGPROBS = 2**25
"""Log-probabilities of one request: 12 bytes each on the host, and 70 as Python's values."""


class Parameters(Protocol):
    """Those of `SamplingParams` that are bounded here."""

    n: int
    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None

    @property
    def stop_strings(self) -> Sequence[str]:
        """None is longer than MAX_CHARACTERS."""

    @property
    def stop_token_ids(self) -> Sequence[int] | None:
        """MAX_STOP_IDS."""

    @property
    def logit_bias(self) -> Mapping[int, float] | None:
        """MAX_BIASES."""

    @property
    def bad_words(self) -> Sequence[str] | None:
        """MAX_BAD_WORDS, none longer than MAX_CHARACTERS."""

    @property
    def bad_words_token_ids(self) -> Sequence[Sequence[int]] | None:
        """MAX_BAD_WORDS, none longer than MAX_BAD_WORD_TOKENS."""


def check_sizes(params: Parameters) -> None:
    """Refuse lists of a request that would cost other requests memory or time.

    Raises:
        ValueError: a list is too long, or has a text or word that is.
    """
    _at_most("stop", len(params.stop_strings), MAX_STOPS, "strings")
    for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words or ())):
        _at_most(f"the longest entry of {name}", _longest(texts), MAX_CHARACTERS, "characters")
    _at_most("stop_token_ids", len(params.stop_token_ids or ()), MAX_STOP_IDS, "ids")
    _at_most("logit_bias", len(params.logit_bias or ()), MAX_BIASES, "ids")
    _at_most("bad_words", len(params.bad_words or ()), MAX_BAD_WORDS, "words")
    words = params.bad_words_token_ids or ()
    hint = " (one of bad_words is up to two: with a space before it, and without)"
    _at_most("bad_words_token_ids", len(words), MAX_BAD_WORDS, f"words{hint}")
    _at_most("the longest bad word", _longest(words), MAX_BAD_WORD_TOKENS, "tokens")


def check_logprobs(
    params: Parameters, prompt_len: int, max_model_len: int, vocab_size: int
) -> None:
    """Refuse more log-probabilities than the host can keep.

    Raises:
        ValueError: too many, with what makes them so many.
    """
    room = max_model_len - prompt_len
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    asked = (
        ("logprobs", params.logprobs, most * params.n, "max_tokens or n"),
        ("prompt_logprobs", params.prompt_logprobs, prompt_len, "the prompt"),
    )
    for name, wanted, num_tokens, other in asked:
        if wanted is None:
            continue
        count = num_tokens * (1 + (vocab_size if wanted == -1 else min(wanted, vocab_size)))
        if count > MAX_LOGPROBS:
            raise ValueError(
                f"{name} is {wanted}, which for {num_tokens} tokens are {count} "
                f"log-probabilities: at most {MAX_LOGPROBS} are kept, so lower {name} or {other}"
            )


def _longest(items: Iterable[Sized]) -> int:
    return max(map(len, items), default=0)


def _at_most(name: str, size: int, most: int, what: str) -> None:
    if size > most:
        raise ValueError(f"{name} has {size} {what}: at most {most} are taken, so give fewer")
