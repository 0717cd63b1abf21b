"""The shapes of /pooling; vLLM's."""

from typing import Literal

from nv_api.server.protocol.fields import Given
from nv_api.server.protocol.pooled import Encoded, PooledInput, PooledResponse


class PoolingRequest(PooledInput, Encoded):
    """Texts, and what to make of them."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    """None: the result of each token."""


class Pooling(Given):
    """One text's."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[list[float]] | list[float] | str
    """A row for each token, or one row; or their fp32 bytes in base64."""


class PoolingResponse(PooledResponse):
    """In the order of the input."""

    data: list[Pooling]
