"""ScoreJob: a request to /v1/score.

Owns the names that the two texts of a pair may have.
"""

from collections.abc import Sequence
from typing import Any

from nv_api.pooling_outputs import PooledValues
from nv_api.server.errors import invalid
from nv_api.server.jobs.pairs import PairsJob, Side
from nv_api.server.protocol.score import NAMES, ScoreRequest
from nv_api.server.service import Service


class ScoreJob(PairsJob):
    """Pairs of texts to score.

    Args:
        asked: the request.
        service: the server's parts.
        request_id: of HTTP.

    Raises:
        ApiError: 400 or 404, a field is wrong, or the model makes no scores.
    """

    operation = "score"

    def __init__(self, asked: ScoreRequest, service: Service, request_id: str) -> None:
        first, second = (Side.of(getattr(asked, name), name) for name in _names(asked))
        super().__init__(asked, first, second, service, f"score-{request_id}")

    def items(self, results: Sequence[PooledValues]) -> list[dict[str, Any]]:
        """The scores."""
        return [{"object": "score", "score": score} for score in self.scores(results)]


def _names(asked: ScoreRequest) -> tuple[str, str]:
    """The names that a request uses.

    Raises:
        ApiError: 400, it does not have exactly one of the pairs.
    """
    given = {name for pair in NAMES for name in pair if getattr(asked, name) is not None}
    if found := [pair for pair in NAMES if given == {*pair}]:
        return found[0]
    for pair in NAMES:
        for name, other in (pair, pair[::-1]):
            if given == {name}:
                raise invalid(f"{other} is missing: give it beside {name}", other)
    others = " or ".join(f"{first} and {second}" for first, second in NAMES[1:])
    has = f"has {', '.join(sorted(given))}" if given else "has no texts"
    first, second = NAMES[0]
    raise invalid(f"the request {has}: give {first} and {second} (or {others})", first)
