"""PoolingJob: a request to /pooling.

Owns the task of a request that names none, and how results are sent.
"""

from collections.abc import Sequence
from typing import Any

from nv_engine.pooling_params import TOKEN_TASKS

from nv_api.pooling_outputs import PooledValues
from nv_api.server.answers.pooled import json_numbers
from nv_api.server.jobs.pooled_input import PooledInputJob
from nv_api.server.protocol.pooling import PoolingRequest
from nv_api.server.service import Service


class PoolingJob(PooledInputJob):
    """Texts to pool.

    Args:
        asked: the request.
        service: the server's parts.
        request_id: of HTTP.

    Raises:
        ApiError: 400 or 404, a field is wrong, or the model lacks the task.
    """

    operation = "pooling"

    def __init__(self, asked: PoolingRequest, service: Service, request_id: str) -> None:
        of_tokens = next(task for task in service.pooler.tasks if task in TOKEN_TASKS)
        task, name = asked.task or of_tokens, f"pool-{request_id}"
        super().__init__(asked, task, service, name, dimensions=asked.dimensions)
        self._encoding = asked.encoding_format

    def items(self, results: Sequence[PooledValues]) -> list[dict[str, Any]]:
        """The results."""
        return [
            {"object": "pooling", "data": json_numbers(values, self._encoding)}
            for values in results
        ]
