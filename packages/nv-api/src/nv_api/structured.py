"""Grammars: structured outputs, compiled for a tokenizer.

Owns the use of llguidance (the extra `structured`), which parses grammars and computes the tokens
that may come next. Never applies a mask (the engine does) and never reads a completion's text.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from nv_engine.values import MAX_SHOWN, shown

from nv_api.gbnf import is_gbnf, to_lark
from nv_api.said.forms import MAX_SPACE, spacing

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from nv_engine import Engine, GrammarSource, StructuredOutputsParams
    from transformers import PreTrainedTokenizerBase

Compiled = TypeVar("Compiled")
NUM_GRAMMARS = 256
"""Compiled grammars that are cached."""
COMPILE_SECONDS = 5.0
"""Longest time of a compile; other Python threads run meanwhile."""
STACK_BYTES = 1 << 28
"""Stack of a compile: llguidance recurses, with up to 8 KiB per nested rule."""
NAMED = b"\xff"
"""The byte that llguidance puts before a token that a grammar names: no text has this byte."""
HOT = re.compile(r"^\s*([a-z_]\w*)\s*\[[^\]\n]*\btemperature\b", re.MULTILINE)
"""A Lark rule with a temperature of its own, which llguidance reads and no draw here follows."""
PLAIN_VALUES = frozenset(("const", "default", "enum", "examples"))
"""Keys of a JSON schema whose values are not schemas."""
MASK_SECONDS = 0.5
"""Most CPU time of one mask, or of one accepted token."""
REQUEST_SECONDS, TOKEN_SECONDS = 2.0, 0.02
"""Most CPU time of a request, all its completions together: so much, and so much more for each
token. The other requests of a step wait for it; usual grammars take a small part of it."""

_REASONS = {
    "decimal literal invalid": "a length or a number of repeats is too large: give a smaller one",
    "Token range end too large": "it names a token id past the vocabulary: give a smaller one",
    "NoExtensionBias": "no text fits from here on",
    "retriever does not fetch": "it has a $ref or $schema to another document: put that under "
    "$defs, and refer to it with #/$defs/…",
    "coerce_one_of": "it has a oneOf of which several parts may fit: use anyOf",
    "lookarounds not supported": "look-around, word boundaries and anchors inside are not "
    "supported",
    "too deeply nested": "it has more than 28 groups, ( or [, open at one point: write inner "
    "groups as rules of their own",
    "nested parentheses/brackets": "it has more than 250 groups open at one point: give fewer",
    "Current row has": "it has more than 2000 continuations at one point: write a long alternation "
    "as choice, as regex or as a terminal (a Lark rule whose name is in capitals)",
} | dict.fromkeys(
    (
        "fuel exhausted",
        "too many",
        "Too many items",
        "too big",
        "too large",
        "too complex",
        "panic",
    ),
    "it is too complex: give smaller or fewer repeats, alternatives, rules and intersections",
)
"""Parts of llguidance's errors, and the sentence that a user gets for each."""
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (.*)")
_PLACE = re.compile(r"^line \d+, column \d+: ")


class Grammars:
    """The grammars of one tokenizer.

    Args:
        backend: the tokenizer.
        vocab_size: of the model; a mask has one bit per token, in whole 32-bit words.
        eos_token_ids: each ends a completion where the grammar may end.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: a tokenizer that is written in Python.
    """

    def __init__(
        self, backend: "PreTrainedTokenizerBase", vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        try:
            from llguidance.hf import from_tokenizer  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise ImportError(
                "structured_outputs needs llguidance: pip install 'nv-api[structured]'"
            ) from error
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  # loaded by now

        if not isinstance(backend, PreTrainedTokenizerFast):
            raise ValueError(
                f"structured_outputs needs a fast tokenizer, and {type(backend).__name__} is "
                "written in Python: give one with a tokenizer.json"
            )
        num_words = max(vocab_size, len(backend))
        self._tokenizer = from_tokenizer(backend, n_vocab=num_words, eos_token=list(eos_token_ids))
        self._num_mask_bytes = -(-vocab_size // 32) * 4
        self._compile = lru_cache(NUM_GRAMMARS)(self._compile_source)

    def compile(self, asked: "StructuredOutputsParams") -> "CompiledGrammar":
        """Compile a grammar, or return the cached one.

        Raises:
            ValueError: it does not compile; the message has its text and the reason.
        """
        return self._compile(asked.source)

    def _compile_source(self, source: "GrammarSource") -> "CompiledGrammar":
        try:
            matcher = _in_time(lambda: _start(self._tokenizer, source))
        except ValueError as error:
            message = f"structured_outputs.{source.kind} is {shown(source.text)}: {error}"
            raise ValueError(message) from None
        return CompiledGrammar(matcher, self._tokenizer, self._num_mask_bytes)


def grammar_compiler(
    load: "Callable[[], PreTrainedTokenizerBase | None]", engine: "Engine"
) -> "Callable[[StructuredOutputsParams], CompiledGrammar]":
    """A function that compiles what a request asks for; the first call makes the `Grammars`.

    Args:
        load: returns the tokenizer, or None if there is none.
        engine: of the model.
    """

    @cache
    def grammars() -> Grammars:
        backend = load()
        if backend is None:
            raise ValueError(
                "structured_outputs needs a tokenizer and there is none (skip_tokenizer_init=True)"
            )
        return Grammars(backend, engine.facts.vocab_size, engine.facts.eos_token_ids)

    return lambda asked: grammars().compile(asked)


def fault(lark: str) -> str | None:
    """The reason why a grammar in Lark does not compile; None if it does, as far as can be known.

    It needs no tokenizer, so every `<…>` is taken for one of its tokens.

    Raises:
        ImportError: llguidance is not installed.
    """
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  # an extra

    def found() -> str:
        text = LLMatcher.grammar_from_lark(lark)
        return LLMatcher.validate_grammar(text, limits=LLParserLimits(verbose_errors=False))

    try:
        error = _in_time(found)
    except ValueError as late:
        return str(late)
    return _PLACE.sub("", _reason(error)) if error else None


def _in_time(compiled: Callable[[], Compiled]) -> Compiled:
    """Compile in a new thread, with a deep stack and a deadline.

    After the deadline the thread continues until one of llguidance's own limits ends it.

    Raises:
        ValueError: as `compiled`, or the deadline passed.
    """
    result: Future[Compiled] = Future()

    def work() -> None:
        try:
            result.set_result(compiled())
        except BaseException as error:
            result.set_exception(error)  # the waiting thread raises it

    usual = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=work, daemon=True).start()
    finally:
        threading.stack_size(usual)
    try:
        return result.result(COMPILE_SECONDS)
    except TimeoutError:
        raise ValueError(
            f"it takes more than {COMPILE_SECONDS:g} s to compile: give smaller or fewer repeats, "
            "alternatives and intersections"
        ) from None


def _start(tokenizer: "LLTokenizer", source: "GrammarSource") -> "LLMatcher":
    """A matcher at the beginning of a grammar, tried for one token to find exceeded limits.

    Raises:
        ValueError: it is not a grammar, or no text fits it.
    """
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  # an extra

    if source.kind in ("json", "json_object"):
        _check_patterns(json.loads(source.text))
        options: Any = spacing(0 if source.is_compact else MAX_SPACE)
        text = LLMatcher.grammar_from_json_schema(source.text, overrides=options)
    elif source.kind == "grammar":
        _refuse_temperatures(source.text)
        text = LLMatcher.grammar_from_lark(to_lark(source.text))
    else:
        is_choice = source.kind == "choice"
        text = LLMatcher.grammar_from_regex(
            _alternation(json.loads(source.text)) if is_choice else _regex(source.text)
        )
    # not verbose: an error would contain the whole grammar
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    for tried in (matcher, _one_token_on(matcher, tokenizer.eos_tokens)):
        if tried.is_error():
            is_lark = source.kind == "grammar" and not is_gbnf(source.text)
            reason = _reason(tried.get_error())
            # a place in a translation means nothing to the user
            raise ValueError(reason if is_lark else _PLACE.sub("", reason))
    return matcher


def _refuse_temperatures(lark: str) -> None:
    """Raise ValueError for a rule with a temperature of its own."""
    if found := HOT.search(lark):
        raise ValueError(
            f"the rule {found[1]} has a temperature of its own, which is not followed: leave it "
            "out, and give SamplingParams a temperature"
        )


def _one_token_on(matcher: "LLMatcher", eos_token_ids: Iterable[int]) -> "LLMatcher":
    """A copy after one token that fits: by then llguidance has reached most of its limits."""
    ahead = matcher.deep_copy()
    allowed = int.from_bytes(ahead.compute_bitmask(), "little")
    for token in eos_token_ids:
        allowed &= ~(1 << token)
    if allowed and not ahead.is_error():
        token = (allowed & -allowed).bit_length() - 1
        if ahead.validate_tokens([token]):  # not where an added token spells the text
            ahead.consume_token(token)
    return ahead


def _alternation(texts: Iterable[str]) -> str:
    """Texts as one regular expression: one terminal, where a grammar would have an item each."""
    return "|".join(
        "".join(
            char if char.isalnum() or char in " _" else f"\\x{{{ord(char):x}}}" for char in text
        )
        for text in dict.fromkeys(texts)
    )


def _regex(pattern: str) -> str:
    """A pattern, checked not to end in half an escape, which llguidance would ignore."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("it ends in a single backslash: write two for the character")
    return pattern


def _check_patterns(schema: object) -> None:
    """Check the patterns of a JSON schema; raises ValueError as `_regex`."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        if not isinstance(part, dict):
            continue
        named = part.get("patternProperties")
        for pattern in (part.get("pattern"), *(named if isinstance(named, dict) else ())):
            if isinstance(pattern, str):
                _regex(pattern)
        waiting.extend(value for key, value in part.items() if key not in PLAIN_VALUES)


def _reason(error: str) -> str:
    """An error of llguidance's, in one line."""
    for part, reason in _REASONS.items():
        if part in error:
            return reason
    if keys := _UNKNOWN_KEYS.search(error):
        return _shortened(f"it uses {keys[1]}, which llguidance does not support: leave it out")
    if name := _UNKNOWN_FORMAT.search(error):
        return _shortened(
            f"it has the format {name[1]!r}, which llguidance does not support: give a pattern"
        )
    _, _, of_regex = error.partition("\nerror: ")
    line = (of_regex or error).strip().splitlines()[0]
    line = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", line)
    return _shortened(line)


class HostTime:
    """The CPU time that the grammar of one request has cost, all completions together."""

    def __init__(self) -> None:
        self._seconds, self._num_tokens = 0.0, 0
        self.fault: str | None = None
        """Why no more is spent."""

    def spend(self, began: float, num_tokens: int = 0) -> None:
        """Count the time of this thread since `began`, in which `num_tokens` were accepted."""
        seconds = time.thread_time() - began
        self._seconds += seconds
        self._num_tokens += num_tokens
        allowed = REQUEST_SECONDS + TOKEN_SECONDS * self._num_tokens
        if seconds > MASK_SECONDS:
            cost = f"one token costs {seconds:.1f} s of the host, and {MASK_SECONDS:g} s are"
        elif self._seconds > allowed:
            cost = (
                f"the first {self._num_tokens} tokens cost {self._seconds:.2f} s of the host, and "
                f"{allowed:.2f} s are"
            )
        else:
            return
        self.fault = self.fault or f"{cost} allowed: give a grammar that is less ambiguous"


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar, ready for any number of completions; see `nv_engine.Grammar`."""

    start: "LLMatcher"
    """A matcher at the beginning, which is only copied."""
    tokenizer: "LLTokenizer"
    num_mask_bytes: int
    spent: HostTime = field(default_factory=HostTime)
    """By its matchers."""

    def of_request(self) -> "CompiledGrammar":
        """The same grammar, whose matchers have spent nothing yet."""
        return replace(self, spent=HostTime())

    def matcher(self, end_token_ids: frozenset[int]) -> "GrammarMatcher":
        """A matcher for one completion, at the beginning; `end_token_ids` end it."""
        return GrammarMatcher(self, end_token_ids)


class GrammarMatcher:
    """The place of one completion in its grammar; see `nv_engine.Matcher`."""

    def __init__(self, grammar: CompiledGrammar, end_token_ids: frozenset[int]) -> None:
        self._grammar = grammar
        self._ends = end_token_ids
        self._fault: str | None = None
        self._copy: LLMatcher | None = None

    @property
    def _matcher(self) -> "LLMatcher":
        """llguidance's, copied when it is first needed: thousands of completions may wait."""
        if self._copy is None:
            self._copy = self._grammar.start.deep_copy()
        return self._copy

    def accept(self, token_ids: Iterable[int]) -> str | None:
        """Advance by the tokens drawn; return the reason if one does not fit, else None."""
        for token in token_ids:
            began = time.thread_time()
            if self._is_over:
                break
            if not (token in self._ends and self._matcher.is_accepting()):
                self._take(token)
            self._grammar.spent.spend(began, 1)
        return f"structured_outputs: {self._fault}" if self._is_over else None

    @property
    def _is_over(self) -> bool:
        """Whether the completion, or a request's time, has come to an error."""
        self._fault = self._fault or self._grammar.spent.fault
        return self._fault is not None

    def _take(self, token: int) -> None:
        """Advance by a token of the text, or by one that the grammar names as its last."""
        ends = token in self._ends
        if ends and not self._may_end_with(self._matcher, token):
            self._fault = f"token {token} ends the text where the grammar does not"
        elif not self._matcher.consume_token(token):
            self._fault = _reason(self._matcher.get_error())

    def mask(self, unwanted: Collection[int]) -> bytes:
        """Tokens that may come next, without the unwanted ones unless no others are left."""
        if self._is_over:  # what is drawn does not count
            return b"\xff" * self._grammar.num_mask_bytes
        began = time.thread_time()
        bits = self._allowed()
        self._grammar.spent.spend(began)
        if self._matcher.is_error():
            self._fault = _reason(self._matcher.get_error())
        wanted = bytearray(bits)
        for token in unwanted:
            wanted[token // 8] &= ~(1 << token % 8)
        return bytes(wanted) if any(wanted) else bits

    def _allowed(self) -> bytes:
        """The mask of tokens that fit; those that end the text only where the grammar may end."""
        matcher = self._matcher
        fitting: bytes = matcher.compute_bitmask()[: self._grammar.num_mask_bytes]
        allowed = int.from_bytes(fitting, "little")
        if allowed.bit_count() == 1:
            fitting = self._spelled(allowed.bit_length() - 1).to_bytes(len(fitting), "little")
        bits, may_end = bytearray(fitting), matcher.is_accepting()
        for token in self._ends:
            byte, bit = token // 8, 1 << token % 8
            if may_end:
                bits[byte] |= bit
            elif bits[byte] & bit and not self._may_end_with(matcher, token):
                bits[byte] &= ~bit
        if any(bits):
            return bytes(bits)
        self._fault = (
            "every token that fits ends the text (EOS, stop_token_ids), and the grammar does not "
            "end here: take it out of stop_token_ids, or EOS out of the middle of the grammar"
        )
        return fitting

    def _may_end_with(self, matcher: "LLMatcher", token: int) -> bool:
        """Whether a token that ends the text also ends the grammar.

        It does if it is a special token that the grammar names as its last. An ordinary token never
        does: a stop token's text is not in the completion, so the grammar would be incomplete.
        """
        if not self._grammar.tokenizer.is_special_token(token):
            return False
        ahead = matcher.deep_copy()
        return ahead.consume_token(token) and ahead.is_accepting()

    def _spelled(self, token: int) -> int:
        """The mask of the one token that may come next.

        If the next text is that of an added token (`<think>`), llguidance allows this token and
        then rejects it: the mask then has the first of the plain tokens that spell the text. A
        token that the grammar names stays, also EOS, which llguidance calls invalid and takes.
        """
        text = self._matcher.compute_ff_bytes()
        must_come = "" if text.startswith(NAMED) else text.decode(errors="ignore")
        if must_come and not self._matcher.validate_tokens([token]):
            token = self._grammar.tokenizer.greedy_tokenize(must_come)[0]
        return 1 << token

    def reset(self) -> None:
        """Go back to the beginning."""
        self._copy = self._fault = None


def _shortened(text: str) -> str:
    """A library's text on one line, cut after MAX_SHOWN characters; also a single word is cut."""
    line = " ".join(text[: 4 * MAX_SHOWN].split())
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 2]} …"
