"""SamplingParams: how the next tokens of one request are chosen.

Owns the fields, their bounds and their defaults; never reads text (stop strings travel through as
they are) and never touches a tensor.
"""

import math
from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import FrozenInstanceError, dataclass, fields
from numbers import Integral, Real
from typing import Any

from nv_engine.grammar import StructuredOutputsParams

MAX_SEED = 2**64
MAX_COUNT = 2**31 - 1
"""Largest count or token id: what a device keeps it in."""
LARGEST = 3.4e38
"""Largest real number: what fp32 holds."""
_FROZEN = "_is_frozen"


@dataclass(kw_only=True)
class SamplingParams:
    """Parameters of one request's completions; names and meanings follow vLLM's `SamplingParams`.

    Fields may be set until a request is made of them: it takes a copy, checked then.

    Raises:
        ValueError: at construction, for a value out of range; names the field, value and range.
    """

    n: int = 1
    """Completions a prompt, at least 1."""
    temperature: float = 1.0
    """0 is greedy; otherwise the logits are divided by it."""
    top_p: float = 1.0
    """Smallest set of most likely tokens whose mass reaches this, in (0, 1]."""
    top_k: int = -1
    """The k most likely tokens; -1 or 0 is off."""
    min_p: float = 0.0
    """Least probability, relative to the most likely token's, in [0, 1]."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that was generated already."""
    frequency_penalty: float = 0.0
    """Taken once for each time that the token was generated."""
    repetition_penalty: float = 1.0
    """Divides (negative: multiplies) the logit of every token of the prompt and the completion."""
    seed: int | None = None
    """Makes the draws depend on (seed, completion index, position) alone."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: up to the engine's max_model_len."""
    min_tokens: int = 0
    """Neither EOS nor a stop token is drawn before this many tokens."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Most likely tokens to report beside each drawn one, by raw logits; -1: the vocabulary."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, which are then computed even where they are cached."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens."""
    allowed_token_ids: list[int] | None = None
    """No other token is drawn."""
    bad_words: list[str] | None = None
    """Texts whose last token is not drawn after their others; the engine takes them as ids."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Bad words as token ids; `bad_words` adds to them where there is a tokenizer."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must be; the layer that knows text compiles it."""

    def __post_init__(self) -> None:
        self.check()

    def __setattr__(self, name: str, value: object) -> None:
        if _FROZEN in self.__dict__:
            raise FrozenInstanceError(f"{name} cannot be set: a request has these parameters")
        object.__setattr__(self, name, value)

    def check(self) -> None:
        """Raise ValueError for a value out of range."""
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        self._check_tokens()
        asked = self.structured_outputs
        if asked is not None and not isinstance(asked, StructuredOutputsParams):
            raise ValueError(
                f"structured_outputs is {asked!r}: it must be a StructuredOutputsParams"
            )

    def clone(self) -> "SamplingParams":
        """A copy with nothing in common; its fields may be set."""
        twin = copy(self)
        twin.__dict__.pop(_FROZEN, None)
        plain = (bool, int, float, str, type(None))  # nearly all, and every request is a clone
        for name, value in self.__dict__.items():
            if not isinstance(value, plain):
                twin.__dict__[name] = deepcopy(value)
        return twin

    def frozen(self) -> "SamplingParams":
        """A copy that nobody can change, or this one if it is such a copy.

        Raises:
            ValueError: a field was set to a value out of range.
        """
        if _FROZEN in self.__dict__:
            return self
        twin = self.clone()
        twin.check()
        twin.__dict__[_FROZEN] = True
        return twin

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1)
        _real("temperature", self.temperature, 0.0, math.inf)
        _real("top_p", self.top_p, 0.0, 1.0, above=True)
        _integer("top_k", self.top_k, -1)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(MAX_SEED // 2), MAX_SEED - 1)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, hint="None means up to max_model_len")
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}: it must be at most max_tokens, "
                f"which is {self.max_tokens}"
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, -1, hint="-1 means the whole vocabulary")
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, -1)

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str | list | tuple):
            raise ValueError(f"stop is {self.stop!r}: it must be a string or a list of strings")
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise ValueError(f"stop is {self.stop!r}: every stop string must be a non-empty string")
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings need text: set detokenize=True, or use stop_token_ids")

    def _check_tokens(self) -> None:
        _token_ids("stop_token_ids", self.stop_token_ids)
        _token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is []: it must name at least one token, or be None")
        _token_ids("logit_bias", self.logit_bias)
        for token, bias in (self.logit_bias or {}).items():
            _real(f"logit_bias[{token}]", bias, -math.inf, math.inf)
        for word in self.bad_words_token_ids or ():
            _token_ids("bad_words_token_ids", word)
            if not word:
                raise ValueError("bad_words_token_ids has an empty entry: each must have a token")
        if any(not isinstance(word, str) or not word for word in self.bad_words or []):
            raise ValueError(f"bad_words is {self.bad_words!r}: each must be a non-empty string")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however `stop` was spelled."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken."""
        return self.temperature == 0.0

    def changed(self, names: Iterable[str]) -> list[str]:
        """Which of the fields `names` differ from their defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]


def _real(
    name: str,
    value: Any,  # noqa: ANN401  # whatever a user gave
    low: float,
    high: float,
    *,
    above: bool = False,
) -> None:
    """Refuse what is not a number in [low, high], or in (low, high] with `above`."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    inside = number and (low < value if above else low <= value) and value <= high
    if not inside or value in (math.inf, -math.inf) or abs(value) > LARGEST:  # nan fails them all
        bounds = f"{'(' if above else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
        raise ValueError(f"{name} is {value!r}: it must be a number in {bounds}")


def _integer(
    name: str,
    value: Any,  # noqa: ANN401  # whatever a user gave
    low: int,
    high: int = MAX_COUNT,
    *,
    hint: str = "",
) -> None:
    """Refuse what is not an integer in [low, high]."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        bound = f"at least {low}" if whole and value < low else f"in [{low}, {high}]"
        raise ValueError(
            f"{name} is {value!r}: it must be an integer, {bound}{f' ({hint})' if hint else ''}"
        )


def _token_ids(name: str, ids: Iterable[int] | None) -> None:
    """Refuse what is not a token id; the vocabulary's bound is the engine's to check."""
    for token in ids or ():
        _integer(f"{name} entry", token, 0)
