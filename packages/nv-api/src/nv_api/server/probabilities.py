"""Probabilities: log-probabilities in OpenAI's two shapes.

Owns the names of tokens in them, and the offsets of tokens in their text. Never computes one.
"""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nv_api.outputs import Logprob
from nv_api.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0
"""In place of a log-probability that is not finite, which JSON cannot have."""

Position = dict[int, Logprob]
"""The candidates at one position, the token itself first."""


@dataclass(frozen=True)
class TokenNames:
    """How a response names tokens.

    Args:
        tokenizer: None: as ids.
        as_ids: as "token_id:17", which tells apart tokens with the same text.
    """

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def name(self, token_id: int) -> str:
        """A token as a text."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes; of a part of a character, that part's."""
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)


def finite(logprob: float) -> float:
    """A log-probability that JSON can have."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def chat_logprobs(
    positions: Sequence[Position], num_top: int, names: TokenNames
) -> list[dict[str, Any]]:
    """Chat's shape of some tokens: each with the `num_top` most likely ones, best first."""
    return [
        {
            **_entry(token_id, candidates[token_id], names),
            "top_logprobs": [
                _entry(other, candidate, names)
                for other, candidate in _most_likely(candidates, num_top)
            ],
        }
        for candidates in positions
        for token_id in (next(iter(candidates)),)
    ]


def prompt_logprobs(positions: Sequence[Position | None]) -> list[dict[str, Any] | None]:
    """VLLM's shape of a prompt's tokens: a dict by id for each; the first has none."""
    return [
        None
        if candidates is None
        else {
            str(token_id): {
                "logprob": finite(candidate.logprob),
                "rank": candidate.rank,
                "decoded_token": candidate.decoded_token,
            }
            for token_id, candidate in candidates.items()
        }
        for candidates in positions
    ]


@dataclass
class CompletionColumns:
    """Completions' shape: a column for each property, which grow with the text.

    `text_offset` counts characters from the beginning of the choice's text. A token that is a part
    of a character begins where that character does.
    """

    names: TokenNames
    num_tokens: int = 0
    _offset: int = 0
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def columns(
        self, token_ids: Sequence[int], positions: Sequence[Position | None]
    ) -> dict[str, Any]:
        """The columns of the tokens that follow; None is the first token of a prompt."""
        found: dict[str, Any] = {
            "tokens": [self.names.name(token_id) for token_id in token_ids],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, candidates in zip(token_ids, positions, strict=True):
            found["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self.names.bytes_of(token_id)))
            if candidates is None:
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
            else:
                found["token_logprobs"].append(finite(candidates[token_id].logprob))
                found["top_logprobs"].append(self._tops(candidates))
        self.num_tokens += len(token_ids)
        return found

    def _tops(self, candidates: Position) -> dict[str, float]:
        """By name; of tokens with the same text, the most likely one."""
        tops: dict[str, float] = {}
        for token_id, candidate in candidates.items():
            name = self.names.name(token_id)
            tops[name] = max(finite(candidate.logprob), tops.get(name, -math.inf))
        return tops


def _most_likely(candidates: Position, num_top: int) -> list[tuple[int, Logprob]]:
    ranked = sorted(candidates.items(), key=lambda each: -finite(each[1].logprob))
    return ranked[:num_top]


def _entry(token_id: int, candidate: Logprob, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token_id),
        "logprob": finite(candidate.logprob),
        "bytes": list(names.bytes_of(token_id)),
    }
