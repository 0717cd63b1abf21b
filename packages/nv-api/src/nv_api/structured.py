"""Grammars: what a completion's text must be, compiled for a tokenizer.

Owns the way to llguidance (the extra `structured`), which knows grammars and which tokens follow.
Never applies a mask (the engine does) and never reads a completion's text.
"""

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from nv_engine import GrammarSource, StructuredOutputsParams
    from transformers import PreTrainedTokenizerBase

NUM_GRAMMARS = 256
"""Compiled grammars that are kept."""
MAX_SHOWN = 300
"""Characters of a grammar that an error shows."""


class Grammars:
    """The grammars of one tokenizer.

    Args:
        backend: the tokenizer.
        vocab_size: of the model; a mask has so many bits, in whole 32-bit words.
        eos_token_ids: each ends a completion, where the grammar may end.

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
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_mask_bytes = -(-vocab_size // 32) * 4
        self._compile = lru_cache(NUM_GRAMMARS)(self._compile_source)

    def compile(self, asked: "StructuredOutputsParams") -> "CompiledGrammar":
        """Compile a grammar, or find it compiled.

        Raises:
            ValueError: it is none; the message has its text and what is wrong with it.
        """
        return self._compile(asked.source)

    def _compile_source(self, source: "GrammarSource") -> "CompiledGrammar":
        try:
            matcher = _start(self._tokenizer, source)
        except ValueError as error:
            shown = textwrap.shorten(source.text, MAX_SHOWN)
            message = f"structured_outputs.{source.kind} is {shown!r}: {error}"
            raise ValueError(message) from None
        return CompiledGrammar(matcher, self._tokenizer, self._eos_token_ids, self._num_mask_bytes)


def _start(tokenizer: "LLTokenizer", source: "GrammarSource") -> "LLMatcher":
    """A matcher at the beginning of a grammar.

    Raises:
        ValueError: it is no grammar.
    """
    from llguidance import LLMatcher, LLParserLimits, grammar_from  # noqa: PLC0415  # an extra

    if source.kind in ("json", "json_object"):
        text = LLMatcher.grammar_from_json_schema(
            source.text, overrides={"whitespace_flexible": not source.is_compact}
        )
    elif source.kind == "regex":
        text = LLMatcher.grammar_from_regex(source.text)
    elif source.kind == "choice":
        text = grammar_from("choice", source.text)
    else:
        text = grammar_from("grammar", source.text)
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, tokenizer)
    if is_wrong:
        raise ValueError(messages[0].strip())
    # A matcher says no more than what is wrong: not the whole grammar.
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar, ready for any number of completions; see `nv_engine.Grammar`."""

    start: "LLMatcher"
    """At the beginning, where it stays."""
    tokenizer: "LLTokenizer"
    eos_token_ids: frozenset[int]
    num_mask_bytes: int

    def matcher(self) -> "GrammarMatcher":
        """A matcher of one completion's own, at the beginning."""
        return GrammarMatcher(self)


class GrammarMatcher:
    """Where one completion stands in its grammar; see `nv_engine.Matcher`."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.start.deep_copy()

    def accept(self, token_ids: Iterable[int]) -> str | None:
        """Go on by the tokens drawn; if one does not fit, say why."""
        matcher = self._matcher
        for token in token_ids:
            is_over = matcher.is_stopped() and not matcher.is_error()
            if is_over and token in self._grammar.eos_token_ids:
                continue  # llguidance takes no token behind its own end, this one neither
            if not matcher.consume_token(token):
                return f"structured_outputs: {matcher.get_error().splitlines()[0]}"
        return None

    def mask(self, unwanted: Collection[int]) -> bytes:
        """Which tokens may come next, without those unwanted unless nothing else is left."""
        bits: bytes = self._matcher.compute_bitmask()[: self._grammar.num_mask_bytes]
        allowed = int.from_bytes(bits, "little")
        if allowed.bit_count() == 1:
            bits = self._spelled(allowed.bit_length() - 1).to_bytes(len(bits), "little")
        if not unwanted:
            return bits
        wanted = bytearray(bits)
        for token in unwanted:
            wanted[token // 8] &= ~(1 << token % 8)
        return bytes(wanted) if any(wanted) else bits

    def _spelled(self, token: int) -> int:
        """The mask of the one token that may come next.

        Where text must come that an added token spells (`<think>`), llguidance allows that token
        and then refuses it: then the mask is of the first of the plain tokens that spell it.
        """
        must_come = self._matcher.compute_ff_bytes().decode(errors="ignore")
        if must_come and not self._matcher.validate_tokens([token]):
            token = self._grammar.tokenizer.greedy_tokenize(must_come)[0]
        return 1 << token

    def reset(self) -> None:
        """Go back to the beginning."""
        self._matcher = self._grammar.start.deep_copy()
