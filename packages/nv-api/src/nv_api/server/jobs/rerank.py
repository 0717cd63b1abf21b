"""RerankJob: a request to /v1/rerank.

Owns the order of the results, and how many there are.
"""

from collections.abc import Sequence
from typing import Any

from nv_api.pooling_outputs import PooledValues
from nv_api.server.errors import invalid
from nv_api.server.jobs.pairs import PairsJob, Side
from nv_api.server.protocol.rerank import RerankRequest
from nv_api.server.service import Service


class RerankJob(PairsJob):
    """Texts to sort by how well they answer a query.

    Args:
        asked: the request.
        service: the server's parts.
        request_id: of HTTP.

    Raises:
        ApiError: 400 or 404, a field is wrong, or the model makes no scores.
    """

    operation = "rerank"

    def __init__(self, asked: RerankRequest, service: Service, request_id: str) -> None:
        if asked.top_n is not None and asked.top_n < 0:
            raise invalid(
                f"top_n is {asked.top_n}: it must be at least 1, or 0 for all documents", "top_n"
            )
        documents = Side.of(asked.documents, "documents")
        self._documents = documents.texts
        self._top_n = asked.top_n or len(documents.texts)
        self._shows_documents = asked.return_documents is not False
        query = Side.of(asked.query, "query")
        super().__init__(asked, query, documents, service, f"rerank-{request_id}")

    def response(self, results: Sequence[PooledValues]) -> dict[str, Any]:
        """The response, but for its usage."""
        return {"id": self.name, "model": self.model, "results": self.items(results)}

    def items(self, results: Sequence[PooledValues]) -> list[dict[str, Any]]:
        """The best documents, and of equal ones the first first."""
        scores = self.scores(results)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._top_n]
        return [self._item(index, scores[index]) for index in best]

    def _item(self, index: int, score: float) -> dict[str, Any]:
        document = {"document": {"text": self._documents[index]}} if self._shows_documents else {}
        return {"index": index, **document, "relevance_score": score}
