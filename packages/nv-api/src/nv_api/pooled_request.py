"""PooledRequest: one prompt in flight that is pooled.

Owns what the engine has returned for the prompt. Never talks to the engine.
"""

from typing import TYPE_CHECKING

from nv_engine.scheduling.pooling_sequence import NO_DRAW

from nv_api.completion import Completion
from nv_api.pooling_outputs import PooledValues
from nv_api.prompts import TokenPrompt
from nv_api.request import Request

if TYPE_CHECKING:
    from nv_engine import PooledRows, PoolingParams, SequenceUpdate


class PooledRequest(Request):
    """One prompt in flight, whose one completion has a result in place of tokens.

    Args:
        request_id: the engine's id of the request.
        prompt: its text and its token ids.
        params: what is made of it.
    """

    def __init__(self, request_id: int, prompt: TokenPrompt, params: "PoolingParams") -> None:
        super().__init__(request_id, prompt, (Completion(0, NO_DRAW, None),))
        self.params = params
        self._rows: PooledRows | None = None

    def update(self, update: "SequenceUpdate") -> bool:
        """Apply the one update that there is; True as that is the end."""
        self._rows, self.num_cached_tokens = update.pooled, update.num_cached_tokens
        has_ended = super().update(update)
        self._first_token_time = self._finished_time  # the result is the first news, and the last
        return has_ended

    @property
    def values(self) -> PooledValues:
        """The result, or why there is none."""
        (completion,) = self.completions
        reason = completion.stop_reason or completion.finish_reason
        error = None if self._rows is not None else str(reason or "it has not ended")
        return PooledValues(self._rows, self.params.is_of_tokens, error)
