"""Grammars: what a request asks its completions to look like, and what follows their tokens.

Owns how a grammar is asked for, and the protocols of whoever knows one: the engine hands drawn
tokens in and takes masks out. Never compiles one: that needs text (`nv_api` does).
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of a completion must be; names follow vLLM. Exactly one of the first five.

    Raises:
        ValueError: at construction: none or several are given, or one has the wrong type.
    """

    json: str | dict[str, Any] | None = None
    """JSON that fits this schema (a text or a dict)."""
    regex: str | None = None
    """A text that a regular expression matches from end to end."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A text of a grammar, in EBNF (GBNF: `root ::= …`) or Lark (`start: …`)."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """Compact JSON: no whitespace between its tokens."""

    def __post_init__(self) -> None:
        given = self._given
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {', '.join(given) or 'nothing'}: give exactly one of "
                f"{', '.join(KINDS)}"
            )
        for kind in ("regex", "grammar"):
            text = getattr(self, kind)
            if text is not None and not isinstance(text, str):
                raise ValueError(f"structured_outputs.{kind} is {text!r}: it must be a string")
        for flag in ("json_object", "disable_any_whitespace"):
            value = getattr(self, flag)
            if value is not None and not isinstance(value, bool):
                raise ValueError(
                    f"structured_outputs.{flag} is {value!r}: it must be True or False"
                )
        choice = self.choice
        if choice is not None and not _is_texts(choice):
            raise ValueError(
                f"structured_outputs.choice is {choice!r}: it must be a list of non-empty strings"
            )
        self._check_json()

    def _check_json(self) -> None:
        try:
            schema = json.loads(self.source.text) if self.json is not None else {}
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"structured_outputs.json is {self.json!r}, which is no JSON: {error}"
            ) from None
        if not isinstance(schema, dict):
            raise ValueError(
                f"structured_outputs.json is {self.json!r}: it must be a schema, which is an object"
            )

    @property
    def _given(self) -> list[str]:
        return [kind for kind in KINDS if getattr(self, kind) not in (None, False)]

    @property
    def source(self) -> "GrammarSource":
        """What was asked for, as texts."""
        (kind,) = self._given
        value = getattr(self, kind)
        if kind == "json_object":
            text = '{"type": "object"}'
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return GrammarSource(kind, text, self.disable_any_whitespace)


def _is_texts(value: object) -> bool:
    """True for a list, not empty, of texts that are not empty."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(text, str) and text for text in value)


class GrammarSource(NamedTuple):
    """A grammar to compile: hashable."""

    kind: str
    """One of KINDS."""
    text: str
    """The schema, expression or grammar; of a choice its texts as a JSON list."""
    is_compact: bool


class Matcher(Protocol):
    """Where one completion stands in its grammar."""

    def accept(self, token_ids: Iterable[int]) -> str | None:
        """Go on by the tokens drawn; if one does not fit, say why, and go nowhere from then on."""

    def mask(self, unwanted: Collection[int]) -> bytes:
        """Which tokens may come next: a bit each, lowest first, in ceil(V / 32) * 4 bytes.

        EOS may come where the grammar may end, and ends it. At least one bit is set.

        Args:
            unwanted: tokens to leave out, unless nothing else is left.
        """

    def reset(self) -> None:
        """Go back to the beginning."""


class Grammar(Protocol):
    """A compiled grammar."""

    def matcher(self) -> Matcher:
        """A matcher of one completion's own, at the beginning."""
