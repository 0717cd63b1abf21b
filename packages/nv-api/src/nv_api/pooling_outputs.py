"""The results of pooling requests: vLLM's PoolingRequestOutput and its kin.

Owns their shapes, and how fp32 values become Python's: when they are read, so that a list of many
embeddings is not made into many floats that no caller reads. Never computes a result.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from nv_engine.batch import PooledRows

if TYPE_CHECKING:
    from torch import Tensor


class PooledValues(NamedTuple):
    """The values of one prompt as the engine returns them."""

    rows: PooledRows | None
    """None if the request failed or was aborted."""
    is_of_tokens: bool
    """Whether there is a row for each token."""
    error: str | None = None
    """Why there are none."""

    def floats(self) -> list[float]:
        """All values, row after row.

        Raises:
            RuntimeError: the request failed; the message is its reason.
        """
        return array("f", self._found().values).tolist()

    def lists(self) -> Iterator[list[float]]:
        """The values of one row after the other; raises as `floats`."""
        values, width = array("f", self._found().values), self.width
        return (values[i : i + width].tolist() for i in range(0, len(values), width))

    @property
    def content(self) -> bytes:
        """All values as fp32 in the machine's byte order; raises as `floats`."""
        return self._found().values

    def tensor(self) -> "Tensor":
        """The values as fp32: [width], or [tokens, width]; raises as `floats`."""
        import torch  # noqa: PLC0415  # nv_api imports it only where a tensor is wanted

        rows = self._found()
        values = torch.frombuffer(bytearray(rows.values), dtype=torch.float32)
        return values.view(-1, rows.width) if self.is_of_tokens else values

    @property
    def width(self) -> int:
        """Values of a row; raises as `floats`."""
        return self._found().width

    def _found(self) -> PooledRows:
        if self.rows is None:
            raise RuntimeError(f"this request has no result: {self.error}")
        return self.rows


class PoolingOutput:
    """A result as a tensor.

    Reading a result of a request that failed raises a RuntimeError with the reason; the request's
    `error` has it too. So it is with the other classes of results.
    """

    def __init__(self, values: PooledValues) -> None:
        self._values = values

    @cached_property
    def data(self) -> "Tensor":
        """fp32: [width], or of a token task [tokens, width]."""
        return self._values.tensor()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(error={self._values.error!r})"


class EmbeddingOutput(PoolingOutput):
    """An embedding."""

    @cached_property
    def embedding(self) -> list[float]:
        """Its numbers."""
        return self._values.floats()

    @property
    def hidden_size(self) -> int:
        """How many they are."""
        return self._values.width


class ClassificationOutput(PoolingOutput):
    """Class values of a prompt."""

    @cached_property
    def probs(self) -> list[float]:
        """One for each label: probabilities, unless `use_activation` is off."""
        return self._values.floats()

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return self._values.width


class ScoringOutput(PoolingOutput):
    """The score of two texts."""

    @cached_property
    def score(self) -> float:
        """Their embeddings' cosine, or the value of a one-label head."""
        (score,) = self._values.floats()
        return score


Output_co = TypeVar("Output_co", covariant=True)


@dataclass(eq=False)
class PoolingRequestOutput(Generic[Output_co]):
    """The result of one pooling request; names follow vLLM.

    Args:
        request_id: the engine's id, or the one that the user gave (`AsyncLLM`).
        outputs: the result.
        prompt_token_ids: the prompt's tokens, after truncation.
        num_cached_tokens: prompt tokens that the prefix cache had.
        finished: True once there is a result or an error.
        error: the reason why the result is missing; None if it is not.
    """

    request_id: int | str
    outputs: Output_co
    prompt_token_ids: list[int] = field(repr=False)
    num_cached_tokens: int
    finished: bool
    error: str | None = field(default=None, repr=False)  # outputs show it


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of `embed`: `outputs.embedding`."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The result of `classify`: `outputs.probs`."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The result of `score`: `outputs.score`."""


def cosines(first: Sequence[PooledValues], second: Sequence[PooledValues]) -> list[PooledValues]:
    """Cosines of pairs of embeddings of length 1; a pair without both has the first error."""
    pairs = list(zip(first, second, strict=True))
    errors = [left.error or right.error for left, right in pairs]
    both = [pair for pair, error in zip(pairs, errors, strict=True) if error is None]
    scores = iter(_dot_products(both) if both else ())
    return [
        PooledValues(next(scores) if error is None else None, is_of_tokens=False, error=error)
        for error in errors
    ]


def _dot_products(pairs: Sequence[tuple[PooledValues, PooledValues]]) -> list[PooledRows]:
    """Each pair's dot product, as a row of one value."""
    import torch  # noqa: PLC0415  # as above

    left, right = (
        torch.stack([each.tensor() for each in side]) for side in zip(*pairs, strict=True)
    )
    return [PooledRows(1, array("f", [dot]).tobytes()) for dot in (left * right).sum(-1).tolist()]
