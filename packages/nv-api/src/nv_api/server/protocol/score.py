"""The shapes of /v1/score and /score; vLLM's."""

from typing import Literal

from nv_api.server.protocol.fields import Given
from nv_api.server.protocol.pooled import Pooled, PooledResponse, Texts


class ScoreRequest(Pooled):
    """Pairs of texts, under one of four pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None


class Score(Given):
    """One pair's."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(PooledResponse):
    """In the order of the pairs."""

    data: list[Score]
