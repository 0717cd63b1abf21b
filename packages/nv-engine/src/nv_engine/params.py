"""SamplingParams: how the next tokens of one request are chosen.

Owns the fields, their bounds and their defaults; never reads text (stop strings travel through as
they are) and never touches a tensor.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any

from nv_engine import values
from nv_engine.grammar import StructuredOutputsParams
from nv_engine.limits import check_sizes
from nv_engine.sampling_names import SAMPLING_NAMES
from nv_engine.values import shown

MAX_SEED = 2**64
MAX_COMPLETIONS = 16384
"""Of a prompt, as in vLLM: each is a sequence that the host keeps."""
_FROZEN = "_is_frozen"
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@SAMPLING_NAMES.fields_of
@dataclass(kw_only=True)
class SamplingParams:
    """Parameters of one request's completions; names and meanings follow vLLM's `SamplingParams`.

    Fields may be set until a request is made of them: it takes a copy, checked then. Checking makes
    them plain: numpy's and torch's numbers and arrays, and sets of ids, are taken too.

    Raises:
        ValueError: at construction, for a value out of range; names the field, value and range.
        TypeError: a field that is unknown, or a value that is not named.
        NotImplementedError: a field of vLLM's that is not built yet; names what there is instead.
    """

    n: int = 1
    """Completions a prompt, at least 1, at most 16,384."""
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
    """Most likely tokens to report beside each drawn one, by raw logits; -1: the vocabulary.

    Raw logits have a row for each id of a padded vocabulary: ids past the tokenizer's, which are
    not drawn, may be listed.
    """
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
    """The form of the text; nv_api compiles it."""

    @classmethod
    def from_optional(cls, **given: Any) -> "SamplingParams":  # noqa: ANN401
        """Parameters where None stands for the default, but for `max_tokens`; vLLM's name."""
        kept = {n: value for n, value in given.items() if value is not None or n == "max_tokens"}
        return cls(**kept)

    def __post_init__(self) -> None:
        self.check()

    def __setattr__(self, name: str, value: object) -> None:
        if _FROZEN in self.__dict__:
            raise FrozenInstanceError(f"{name} cannot be set: a request has these parameters")
        object.__setattr__(self, name, value)

    def check(self) -> None:
        """Make the values plain (int, float, bool, lists of them), whatever they were given as.

        Raises:
            ValueError: a value is out of range.
        """
        self._check_numbers()
        self._check_lengths()
        for name in _FLAGS:
            self._make(name, values.boolean)
        self._check_stops()
        self._check_tokens()
        check_sizes(self)
        asked = self.structured_outputs
        if asked is not None and not isinstance(asked, StructuredOutputsParams):
            raise ValueError(
                f"structured_outputs is {shown(asked)}: it must be a StructuredOutputsParams"
            )

    def _make(self, name: str, plain: Callable[..., Any], *bounds: float, **more: object) -> None:
        """Put the plain value of a field in its place."""
        self.__dict__[name] = plain(name, getattr(self, name), *bounds, **more)

    def _make_given(
        self, name: str, plain: Callable[..., Any], *bounds: float, **more: object
    ) -> None:
        """The same of a field that may be None."""
        if getattr(self, name) is not None:
            self._make(name, plain, *bounds, **more)

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
        """A copy that cannot be changed, or this one if it is such a copy.

        Raises:
            ValueError: a field was set to a value out of range.
        """
        if _FROZEN in self.__dict__:
            return self
        self.check()
        twin = self.clone()
        twin.__dict__[_FROZEN] = True
        return twin

    def _check_numbers(self) -> None:
        self._make("n", values.integer, 1, MAX_COMPLETIONS)
        self._make("temperature", values.real, 0.0, math.inf)
        self._make("top_p", values.real, 0.0, 1.0, above=True)
        self._make("top_k", values.integer, -1)
        self._make("min_p", values.real, 0.0, 1.0)
        self._make("presence_penalty", values.real, -2.0, 2.0)
        self._make("frequency_penalty", values.real, -2.0, 2.0)
        self._make("repetition_penalty", values.real, 0.0, math.inf, above=True)
        self._make_given("seed", values.integer, -(MAX_SEED // 2), MAX_SEED - 1)

    def _check_lengths(self) -> None:
        self._make_given("max_tokens", values.integer, 1, hint="None means up to max_model_len")
        self._make("min_tokens", values.integer, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}: it must be at most max_tokens, "
                f"which is {self.max_tokens}"
            )
        self._make_given("logprobs", values.integer, -1, hint="-1 means the whole vocabulary")
        self._make_given("prompt_logprobs", values.integer, -1)

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str | list | tuple):
            raise ValueError(
                f"stop is {shown(self.stop)}: it must be a string or a list of strings"
            )
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise ValueError(
                f"stop is {shown(self.stop)}: every stop string must be a non-empty string"
            )
        for text in self.stop_strings:
            values.unicode("stop", text)
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings need text: set detokenize=True, or use stop_token_ids")

    def _check_tokens(self) -> None:
        self._make_given("stop_token_ids", values.token_ids)
        self._make_given("allowed_token_ids", values.token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is []: it must name at least one token, or be None")
        self._make_given("logit_bias", values.token_biases)
        self._make_given("bad_words", values.texts)
        self._make_given("bad_words_token_ids", values.token_lists)

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
