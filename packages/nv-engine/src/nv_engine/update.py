"""SequenceUpdate: what a step gave one completion of a request.

Owns the record that the engine returns. Never counts tokens, never reads text.
"""

from collections.abc import Sequence
from typing import NamedTuple

from nv_engine.batch import PooledRows, TokenLogprobs


class SequenceUpdate(NamedTuple):
    """The tokens that one sequence gained in a step, or its pooled result, and whether it ended."""

    request_id: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    """Which of the request's n completions."""
    token_ids: tuple[int, ...]
    """The new tokens; a final EOS or stop token is among them."""
    finish_reason: str | None
    """None while it runs; then "stop", "length", "abort" or "error"."""
    stop_reason: int | str | None
    """The stop token that ended it (None for EOS), the error's message, or, for "length", what it
    ran into before max_tokens and max_model_len."""
    num_cached_tokens: int
    """Prompt tokens whose keys and values the prefix cache had when it was first admitted."""
    scheduled_time: float | None
    """When it was first admitted, in seconds of `time.monotonic`; None if it never was."""
    logprobs: Sequence[TokenLogprobs] | None = None
    """One for each new token; None unless the parameters ask for them."""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """One for each prompt token but the first: with the first tokens of completion 0, if asked."""
    pooled: PooledRows | None = None
    """The result of a pooling request, with finish_reason "stop"; None of any other."""

    def is_of(self, request_id: int, index: int | None) -> bool:
        """Whether it is about a request, or one completion of it."""
        return self.request_id == request_id and index in (None, self.index)
