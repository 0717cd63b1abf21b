"""Grammars: what a request asks its completions to look like, and what follows their tokens.

Owns how a grammar is asked for, and the protocols of a compiled one: the engine hands drawn
tokens in and takes masks out. Never compiles one: that needs text (`nv_api` does).
"""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from nv_engine.names import ForeignNames
from nv_engine.values import shown

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_BYTES = {"json": 1 << 18, "regex": 1 << 18, "choice": 1 << 20, "grammar": 1 << 16}
"""Most UTF-8 bytes of each kind; of choices, all together. A larger one could compile for long."""
MAX_DEPTH = 100
"""Most brackets that may be open at one point of a JSON schema."""
VLLM_NAMES = ForeignNames(
    no_difference=frozenset({"disable_fallback"}),
    unbuilt={
        "disable_additional_properties": (False,),
        "structural_tag": (),
        "whitespace_pattern": (),
    },
    renamed={
        "choices": "choice",
        "ebnf": "grammar",
        "json_schema": "json",
        "pattern": "regex",
        "schema": "json",
    },
    instead={
        "disable_additional_properties": "put 'additionalProperties': False into the schema",
        "structural_tag": "give json, regex, choice or grammar",
        "whitespace_pattern": "disable_any_whitespace=True allows none",
    },
    advice={"backend": "llguidance compiles every grammar: leave it out"},
)
"""vLLM's fields that we do not have."""
_JSON_STRING = re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


@VLLM_NAMES.fields_of
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of a completion's text; names follow vLLM. Exactly one of the first five.

    Raises:
        TypeError: a field that is unknown, or a value that is not named.
        NotImplementedError: a field of vLLM's that is not built yet; names what there is instead.
        ValueError: at construction: none or several are given, one has the wrong type, or it is
            larger than MAX_BYTES or nested deeper than MAX_DEPTH.
    """

    json: str | dict[str, Any] | None = None
    """JSON that fits this schema (a text or a dict), with at most 8 white space characters in a row
    between its tokens."""
    regex: str | None = None
    """A text that a regular expression matches from end to end."""
    choice: list[str] | None = None
    """One of these texts, each not empty; a text given twice counts once."""
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
                raise ValueError(
                    f"structured_outputs.{kind} is {shown(text)}: it must be a string"
                    f"{', its .pattern' if isinstance(text, re.Pattern) else ''}"
                )
        for flag in ("json_object", "disable_any_whitespace"):
            value = getattr(self, flag)
            if value is not None and not isinstance(value, bool):
                raise ValueError(
                    f"structured_outputs.{flag} is {shown(value)}: it must be True or False"
                )
        choice = self.choice
        if choice is not None and not _is_texts(choice):
            raise ValueError(
                f"structured_outputs.choice is {shown(choice)}: it must be a list of non-empty "
                "strings"
            )
        text = self._text(given[0])
        _check_size(given[0], text)
        if self.json is not None:
            _check_schema(text)

    def _text(self, kind: str) -> str:
        """The requested form, as a text; of a choice its texts as a JSON list."""
        value = getattr(self, kind)
        if kind == "json_object":
            return '{"type": "object"}'
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except RecursionError:
            raise ValueError(_too_deep("more than a thousand")) from None
        except (TypeError, ValueError) as error:
            model = value if isinstance(value, type) else type(value)
            reason = f", which is not JSON: {error}"
            if hasattr(model, "model_json_schema"):  # of pydantic
                reason = f": it must be a JSON schema, so pass {model.__name__}.model_json_schema()"
            raise ValueError(f"structured_outputs.{kind} is {shown(value)}{reason}") from None

    @property
    def _given(self) -> list[str]:
        values = ((kind, getattr(self, kind)) for kind in KINDS)
        return [kind for kind, value in values if value is not None and value is not False]

    @property
    def source(self) -> "GrammarSource":
        """The requested form, as texts."""
        (kind,) = self._given
        return GrammarSource(kind, self._text(kind), self.disable_any_whitespace)


def _check_size(kind: str, text: str) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"structured_outputs.{kind} has {text[error.start]!r}, half of a surrogate pair, which "
            "no text has: give the whole character"
        ) from None
    most = MAX_BYTES.get(kind, num_bytes)
    if num_bytes > most:
        raise ValueError(
            f"structured_outputs.{kind} is {num_bytes} bytes long: at most {most} are compiled, "
            "so give a smaller one"
        )


def _check_schema(text: str) -> None:
    depth = most = 0
    for bracket in _BRACKET.findall(_JSON_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        most = max(most, depth)
    if most > MAX_DEPTH:
        raise ValueError(_too_deep(str(most)))
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(
            f"structured_outputs.json is {shown(text)}, which is not JSON: {error}"
        ) from None
    if not isinstance(schema, dict):
        raise ValueError(
            f"structured_outputs.json is {shown(text)}: it must be a schema, which is an object"
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _too_deep(depth: str) -> str:
    return (
        f"structured_outputs.json is nested {depth} levels deep: at most {MAX_DEPTH} are compiled, "
        "so put inner schemas under $defs and refer to them"
    )


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
        """Advance over drawn tokens; if one does not fit, return why, and stay there."""

    def mask(self, unwanted: Collection[int]) -> bytes:
        """Which tokens may come next: a bit each, lowest first, in ceil(V / 32) * 4 bytes.

        Tokens that end the completion may come where the grammar may end, and only there. At least
        one bit is set.

        Args:
            unwanted: tokens to leave out, unless nothing else is left.
        """

    def reset(self) -> None:
        """Go back to the beginning."""


class Grammar(Protocol):
    """A compiled grammar."""

    def of_request(self) -> "Grammar":
        """The same grammar for a new request, whose completions may share a bound of time."""

    def matcher(self, end_token_ids: frozenset[int]) -> Matcher:
        """A matcher of one completion's own, at the beginning.

        Args:
            end_token_ids: each ends the completion: EOS and its stop tokens.
        """
