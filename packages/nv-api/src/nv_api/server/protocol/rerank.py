"""The shapes of /v1/rerank, /v2/rerank and /rerank; Cohere's and Jina's, as vLLM has them."""

from nv_api.server.protocol.fields import Given, Integer
from nv_api.server.protocol.pooled import Pooled, PooledUsage, Text, Texts


class RerankRequest(Pooled):
    """A query, and texts to sort by how well they answer it."""

    query: Text
    documents: Texts
    top_n: Integer | None = None
    """Most results to return; 0: all."""
    return_documents: bool | None = None
    """False: results have no texts."""


class RerankDocument(Given):
    """A text of the request."""

    text: str


class RerankResult(Given):
    """One text's."""

    index: int
    """Of the text in the request."""
    document: RerankDocument | None = None
    relevance_score: float


class RerankResponse(Given):
    """The best text first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PooledUsage
