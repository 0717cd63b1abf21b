"""PoolingSequence: a sequence that ends with its prompt, and what was made of the prompt.

Owns the rows that the device has sent so far. Never computes one.
"""

from nv_engine.adapter import Adapter
from nv_engine.batch import PooledRows
from nv_engine.params import SamplingParams
from nv_engine.pooling_params import PoolingParams
from nv_engine.scheduling.sequence import END, Sequence
from nv_engine.update import SequenceUpdate

NO_DRAW = SamplingParams(max_tokens=1)
"""Sampling parameters of a sequence that draws nothing."""


class PoolingSequence(Sequence):
    """The mutable state of one pooling request.

    To the scheduler it is a sequence with room for one token, which is never drawn: the step that
    computes its last token gives its result.
    """

    __slots__ = ("_is_whole", "_rows", "pooling")

    pooling: PoolingParams

    def __init__(
        self,
        request_id: int,
        token_ids: list[int],
        params: PoolingParams,
        *,
        is_whole: bool,
        salt: bytes = b"",
        adapter: Adapter | None = None,
    ) -> None:
        """A sequence that has not run yet.

        Args:
            request_id: the request it belongs to.
            token_ids: the prompt; copied.
            params: what is made of it.
            is_whole: whether the result is made of all its tokens, so that none is taken from the
                prefix cache.
            salt: it shares cached blocks only with sequences of an equal salt.
            adapter: that it is computed with; None: the base model alone.
        """
        self.pooling = params
        self._is_whole = is_whole
        limit = len(token_ids) + 1
        super().__init__(
            request_id, 0, token_ids, NO_DRAW, seed=0, limit=limit, salt=salt, adapter=adapter
        )

    @property
    def reads_cache(self) -> bool:
        """Whether cached tokens need not be computed."""
        return not self._is_whole

    def unplace(self) -> None:
        """Forget its place and its rows: the prompt will be computed anew."""
        super().unplace()
        self._rows: list[PooledRows] = []

    def keep_pooled(self, rows: PooledRows) -> None:
        """Keep the next rows until its prompt has ended."""
        self._rows.append(rows)

    def give(self, updates: list[SequenceUpdate]) -> None:
        """End, with its result or its fault, and put an update into `updates`."""
        if self.fault is not None:
            self.fail(self.fault, updates)
            return
        width = self._rows[0].width
        pooled = PooledRows(width, b"".join(rows.values for rows in self._rows))
        update = self.update((), "stop", pooled=pooled)
        updates[END], self.finish_reason = (update,), "stop"  # no call: an interrupt finds both

    def _no_token_reason(self) -> str:
        return (
            "the hidden states of this prompt hold NaN or infinity: look for damaged weights, or "
            "choose a wider dtype, as float16 ends at 65504"
        )
