"""A quantized weight: what every record of codes and scales has, and the definition of its product.

Owns what all records share. Never the layout that a device multiplies fastest:
`quantized_weight` makes that from a record.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from nv_kernels.linear.definitions import linear
from nv_kernels.linear.head import logits
from nv_kernels.linear.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Quantized(Weight):
    """A matrix [N, K] of codes and scales, as a checkpoint has it.

    A subclass defines its values (`dense`), its bytes, and how rows are taken and stacked. One that
    quantizes x too overrides `product`.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """The number of outputs N and of columns K."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that holds the codes."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Compute the values [N, K]: in fp32, rounded once to dtype."""

    @abstractmethod
    def rows(self, index: torch.Tensor) -> Self:
        """Take rows `index` (int64 [n]), in that order."""

    @classmethod
    @abstractmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Put matrices one below the other.

        Raises:
            ValueError: the parts disagree in something that a record has once.
        """

    def product(
        self, x: torch.Tensor, multiply: Multiply, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply by a product of floats: [T, K] -> [T, N], in multiply's dtype or in fp32.

        Args:
            x: [T, K].
            multiply: a product (x, values, bias), such as `nk.linear`.
            bias: [N] or None.
        """
        return multiply(x, self.dense(x.dtype), bias)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        return self.product(x, linear, bias).to(x.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Weight.logits`."""
        return self.product(hidden, lambda x, values, _: logits(x, values), None).float()


class ByRows(Quantized):
    """A dataclass whose tensors have a row per output: a subclass defines `shape` and `dense`."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its tensors by name, each [N, …]."""
        return {
            name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }

    @property
    def device(self) -> torch.device:
        """See `Quantized.device`."""
        return next(iter(self.tensors().values())).device

    @property
    def num_bytes(self) -> int:
        """See `Quantized.num_bytes`."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def rows(self, index: torch.Tensor) -> Self:
        """See `Quantized.rows`."""
        some = {name: tensor[index] for name, tensor in self.tensors().items()}
        return type(self)(**{**vars(self), **some})

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """See `Quantized.stack`."""
        check_columns(parts)
        fields = {
            name: torch.cat([getattr(part, name) for part in parts])
            if name in parts[0].tensors()
            else common(parts, name)
            for name in vars(parts[0])
        }
        return cls(**fields)


def common(parts: Sequence[Quantized], field: str) -> object:
    """Return the value of a field that all parts must share.

    Raises:
        ValueError: they do not.
    """
    values = [getattr(part, field) for part in parts]
    if any(value != values[0] for value in values):
        raise ValueError(f"{field} is {values}: matrices in one stack must agree in it")
    return values[0]


def check_columns(parts: Sequence[Quantized]) -> None:
    """Refuse parts with different numbers of columns."""
    columns = [part.shape[1] for part in parts]
    if len(set(columns)) != 1:
        raise ValueError(f"columns are {columns}: matrices in one stack must agree in them")
