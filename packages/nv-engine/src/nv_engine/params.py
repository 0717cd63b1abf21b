"""SamplingParams: how the next token of one request is chosen."""
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """To be completed."""

    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = 16
