"""The shapes of /classify; vLLM's."""

from nv_api.server.protocol.fields import Given
from nv_api.server.protocol.pooled import PooledInput, PooledResponse


class ClassifyRequest(PooledInput):
    """Texts to classify."""


class ClassValues(Given):
    """One text's."""

    index: int
    label: str
    """The name of the label with the largest value."""
    probs: list[float]
    """One for each label: probabilities, unless `use_activation` is off."""
    num_classes: int


class ClassifyResponse(PooledResponse):
    """In the order of the input."""

    data: list[ClassValues]
