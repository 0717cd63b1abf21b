"""EmbeddingsJob: a request to /v1/embeddings.

Owns how an embedding is sent.
"""

from collections.abc import Sequence
from typing import Any

from nv_api.pooling_outputs import PooledValues
from nv_api.server.answers.pooled import json_numbers
from nv_api.server.jobs.pooled_input import PooledInputJob
from nv_api.server.protocol.embeddings import EmbeddingsRequest
from nv_api.server.service import Service


class EmbeddingsJob(PooledInputJob):
    """Texts to embed.

    Args:
        asked: the request.
        service: the server's parts.
        request_id: of HTTP.

    Raises:
        ApiError: 400 or 404, a field is wrong, or the model does not embed.
    """

    operation = "embeddings"

    def __init__(self, asked: EmbeddingsRequest, service: Service, request_id: str) -> None:
        name = f"embd-{request_id}"
        service.check_task("embed")
        super().__init__(asked, "embed", service, name, dimensions=asked.dimensions)
        self._encoding = asked.encoding_format

    def items(self, results: Sequence[PooledValues]) -> list[dict[str, Any]]:
        """The embeddings."""
        return [
            {"object": "embedding", "embedding": json_numbers(values, self._encoding)}
            for values in results
        ]
