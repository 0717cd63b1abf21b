"""The shapes of /v1/score and /score; vLLM's."""

from typing import Literal

from nv_api.server.protocol.fields import Given
from nv_api.server.protocol.pooled import Pooled, PooledResponse, Texts, one_of

NAMES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""Of the first and the second texts."""


class ScoreRequest(Pooled):
    """Pairs of texts, under one of four pairs of names."""

    model_config = one_of(*NAMES)

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
