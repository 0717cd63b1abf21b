"""The shapes of /v1/embeddings."""

from typing import Literal

from nv_api.server.protocol.fields import Given
from nv_api.server.protocol.pooled import Encoded, PooledInput, PooledResponse


class EmbeddingsRequest(PooledInput, Encoded):
    """Texts to embed."""


class Embedding(Given):
    """One text's."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str
    """Numbers, or their fp32 bytes in base64."""


class EmbeddingsResponse(PooledResponse):
    """In the order of the input."""

    data: list[Embedding]
