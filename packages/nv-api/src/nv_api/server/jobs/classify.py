"""ClassifyJob: a request to /classify.

Owns how class values are sent.
"""

from collections.abc import Sequence
from typing import Any

from nv_api.pooling_outputs import PooledValues
from nv_api.server.jobs.pooled_input import PooledInputJob
from nv_api.server.protocol.classify import ClassifyRequest
from nv_api.server.service import Service


class ClassifyJob(PooledInputJob):
    """Texts to classify.

    Args:
        asked: the request.
        service: the server's parts.
        request_id: of HTTP.

    Raises:
        ApiError: 400 or 404, a field is wrong, or the model does not classify.
    """

    operation = "classify"

    def __init__(self, asked: ClassifyRequest, service: Service, request_id: str) -> None:
        service.check_task("classify")
        super().__init__(asked, "classify", service, f"classify-{request_id}")
        self._labels = service.pooler.labels

    def items(self, results: Sequence[PooledValues]) -> list[dict[str, Any]]:
        """The class values, and the likeliest label."""
        return [self._item(values.floats()) for values in results]

    def _item(self, probs: list[float]) -> dict[str, Any]:
        label = self._labels[probs.index(max(probs))]
        return {"label": label, "probs": probs, "num_classes": len(probs)}
