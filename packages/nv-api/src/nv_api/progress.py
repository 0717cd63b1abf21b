"""Progress: the bar of one `generate` call, with its live rates.

Owns the bar and the arithmetic of tok/s. Never calls the engine.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

from nv_engine.values import shown
from tqdm.auto import tqdm  # type: ignore[import-untyped]

UseTqdm: TypeAlias = bool | Callable[..., Any]
"""False for no bar, True for tqdm's, or a callable with tqdm's arguments."""

REFRESH_SECONDS = 0.2


def check_use_tqdm(use_tqdm: object) -> None:
    """Check `use_tqdm`, which may be another argument in the wrong place.

    Raises:
        TypeError: neither True, False nor a callable.
    """
    if not callable(use_tqdm) and not isinstance(use_tqdm, bool | int | None):
        raise TypeError(
            f"use_tqdm is {shown(use_tqdm)}: it must be True, False or a callable with "
            "tqdm's arguments"
        )


class Rate:
    """Tokens per second, over the steps that had such tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._shown = (0.0, 0.0)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count a step; a step without such tokens does not change the rate."""
        if num_tokens:
            self._tokens += num_tokens
            self._seconds += seconds

    def recent(self, otherwise: str) -> str:
        """The rate since the last call, as text; `otherwise` if there were no such tokens."""
        tokens, seconds = self._tokens - self._shown[0], self._seconds - self._shown[1]
        self._shown = (self._tokens, self._seconds)
        return _text(tokens, seconds) if seconds else otherwise

    def overall(self) -> str:
        """The rate of the whole call, as text."""
        return _text(self._tokens, self._seconds)


class Progress:
    """A bar that counts finished requests and shows `Prefill=…tok/s, Decode=…tok/s`.

    The full time of a step counts for each kind of token in it: a rate covers the steps that had
    such tokens. It is the rate since the last refresh, and at the end that of the whole call.

    Args:
        total: requests to finish.
        use_tqdm: see `UseTqdm`.
        clock: seconds.
        title: in front of the bar.
    """

    def __init__(
        self,
        total: int,
        use_tqdm: UseTqdm,
        clock: Callable[[], float] = time.perf_counter,
        *,
        title: str = "Generating",
    ) -> None:
        bar = use_tqdm if callable(use_tqdm) else tqdm
        self._bar = bar(total=total, desc=title, dynamic_ncols=True) if use_tqdm else None
        self._clock = clock
        self._last = self._refreshed = clock()
        self._rates = {"Prefill": Rate(), "Decode": Rate()}
        self._postfix = dict.fromkeys(self._rates, "0tok/s")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.set_postfix({name: rate.overall() for name, rate in self._rates.items()})
            self._bar.close()

    def step(self, num_prefill_tokens: int, num_decode_tokens: int, num_finished: int) -> None:
        """Count one engine step: its tokens, and the requests that ended in it."""
        if self._bar is None:
            return
        now = self._clock()
        seconds, self._last = now - self._last, now
        self._rates["Prefill"].add(num_prefill_tokens, seconds)
        self._rates["Decode"].add(num_decode_tokens, seconds)
        if num_finished:
            self._bar.update(num_finished)
        if now - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = now
            for name, rate in self._rates.items():
                self._postfix[name] = rate.recent(self._postfix[name])
            self._bar.set_postfix(self._postfix)


def _text(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:.0f}tok/s" if seconds else "0tok/s"
