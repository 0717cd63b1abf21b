"""Outcome: what a client measured of one request.

Owns the definitions of the four times, which are vLLM's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One request, from the moment that it was sent. Times are in seconds."""

    num_prompt: int = 0
    """Tokens of the prompt."""
    num_output: int = 0
    """Tokens of the answer."""
    ttft: float = 0.0
    """Time to first token: to the first event with text."""
    itls: tuple[float, ...] = ()
    """Inter-token latencies: the gaps between events with text, which may hold several tokens."""
    e2el: float = 0.0
    """End-to-end latency: to the last event with text."""
    text: str = ""
    error: str = ""
    """The reason of the failure; "": the answer is whole."""

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None: there is only one."""
        if self.num_output < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output - 1)
