"""Load: the requests of a benchmark, and how fast they are sent.

Owns the options, their bounds and their defaults, which are vLLM's; checked once.
"""

from dataclasses import dataclass, field
from pathlib import Path

from nv_engine import values
from nv_engine.values import shown

CHAT = "openai-chat"
ROUTES = {"openai": "/v1/completions", CHAT: "/v1/chat/completions"}
"""By the option `backend`, as vLLM names them."""
METRICS = ("ttft", "tpot", "itl", "e2el")
INFINITY = float("inf")
MAX_TOKENS = 1 << 24
MAX_MILLISECONDS = 1e9


def milliseconds_by_metric(words: list[str]) -> dict[str, float]:
    """Bounds of a goodput: `["ttft:200", "tpot:20"]`, or both in one text.

    Raises:
        ValueError: a word that is not a metric, a colon and a number.
    """
    bounds = {}
    for word in " ".join(words).replace(",", " ").split():
        metric, _, number = word.partition(":")
        try:
            bound = float(number)
        except ValueError:
            bound = -1.0
        if metric not in METRICS or metric == "itl":
            raise ValueError(
                f"goodput is {shown(word)}: it must be ttft, tpot or e2el, as ttft:200"
            )
        bounds[metric] = values.real(f"goodput {metric}", bound, 0.0, MAX_MILLISECONDS, above=True)
    return bounds


def percentiles_of(text: str) -> tuple[float, ...]:
    """Percentiles: "50,99".

    Raises:
        ValueError: a word that is not a number from 0 to 100.
    """
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"metric_percentiles is {shown(text)}: it must be numbers from 0 to 100, as 50,99"
        ) from None
    return tuple(values.real("metric_percentiles", each, 0.0, 100.0) for each in found)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests, their pace, and what is asked of each.

    Raises:
        ValueError: at construction, for a value out of range; names the option, value and range.
    """

    backend: str = "openai"
    dataset_path: Path | None = None
    """A file of prompts; None: random token ids."""
    num_prompts: int = 1000
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    """Lengths are drawn from len * (1 - ratio) to len * (1 + ratio)."""
    random_prefix_len: int = 0
    """Tokens before each random prompt that prompts share."""
    random_num_prefixes: int = 1
    """Different ones of those; each prompt draws one."""
    output_len: int | None = None
    """Most tokens of an answer to a prompt of a file that does not give its own."""
    request_rate: float = INFINITY
    """Requests per second on average; inf: all at once."""
    burstiness: float = 1.0
    """1: a Poisson process; below, requests come in bursts; above, more evenly."""
    max_concurrency: int | None = None
    """Most requests in flight; others wait, and that wait is not measured."""
    seed: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    num_warmups: int = 0
    """Requests before those that are measured, besides the first."""
    request_timeout: float = 3600.0
    extra_body: dict[str, object] = field(default_factory=dict)
    """More fields of each request; they win."""

    def __post_init__(self) -> None:
        values.one_of("backend", self.backend, tuple(ROUTES))
        for name in "num_prompts", "random_input_len", "random_output_len", "random_num_prefixes":
            values.integer(name, getattr(self, name), 1, MAX_TOKENS)
        for name in "random_prefix_len", "num_warmups":
            values.integer(name, getattr(self, name), 0, MAX_TOKENS)
        for name in "output_len", "max_concurrency":
            if getattr(self, name) is not None:
                values.integer(name, getattr(self, name), 1, MAX_TOKENS)
        values.integer("seed", self.seed, 0)
        values.real("temperature", self.temperature, 0.0, 100.0)
        if not 0.0 <= self.random_range_ratio < 1.0:
            raise ValueError(
                f"random_range_ratio is {self.random_range_ratio}: it must be at least 0 and "
                "below 1"
            )
        if self.request_rate != INFINITY:
            values.real("request_rate", self.request_rate, 0.0, 1e6, above=True)
        values.real("burstiness", self.burstiness, 0.0, 1e6, above=True)
        values.real("request_timeout", self.request_timeout, 0.0, 1e6, above=True)
