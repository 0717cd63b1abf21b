"""Zeros: tensors that an interrupted download left empty, whole or in part.

Owns which zeros are errors, which are warned of, and how few values show them. Never reads a file.
"""

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from nv_models.checkpoint import Checkpoint
from nv_models.listing import first_few
from nv_models.quantization.form import FLOATS
from nv_models.shard import Shard

AGAIN = "download or convert it again"
TABLES = ("embed_tokens", "lm_head")
ENDS = (*TABLES, "norm")
"""Modules without which a model has no use, outside its layers."""
NORM = "norm.weight"
SEEN_VALUES = 64
"""Along each dimension of a tensor that may be zeros, before all of it is read."""
MOST_OF_MATRIX, MOST_OF_TABLE = 0.1, 0.5
"""The share of rows that may be zeros without a warning: of a table, those of ids without a token.
"""


class Zeros(NamedTuple):
    """A tensor with rows of zeros."""

    source: str
    """Its name."""
    num_zeros: int
    num_rows: int
    """Of one shard of it. A vector is one row."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing else is there."""
        return self.num_zeros == self.num_rows


def zeros_of(shards: Iterable[Shard], *, has_offset: bool) -> list[Zeros]:
    """The tensors that have more rows of zeros than a trained model has.

    Some values of some rows are looked at, and if these show zeros, all. Biases may be zeros, norms
    that multiply by 1 + weight (`has_offset`), and codes, whose scales are looked at; blocks of a
    mapped file (`Shard.is_filled`) have both.
    """
    looked_at = [
        shard
        for shard in shards
        if (shard.is_filled or shard.target.dtype in FLOATS)
        and not shard.source.endswith("bias")
        and not (has_offset and shard.source.endswith(NORM))
    ]
    if not looked_at:
        return []
    samples = [some_values(shard.target).any(-1).flatten() for shard in looked_at]
    sizes = [len(sample) for sample in samples]
    seen, found = iter(torch.cat(samples).tolist()), []
    for shard, size in zip(looked_at, sizes, strict=True):
        are_filled = [next(seen) for _ in range(size)]
        is_table = _is_of(shard.source, TABLES)
        most = (MOST_OF_TABLE if is_table else MOST_OF_MATRIX) * size
        if are_filled.count(False) > most or not (are_filled[-1] or is_table):
            rows = shard.target.any(-1).flatten()
            if num_zeros := len(rows) - int(rows.sum()):
                found.append(Zeros(shard.source, num_zeros, len(rows)))
    return found


def refuse_zeros(found: Iterable[Zeros], checkpoint: Checkpoint) -> None:
    """Raise ValueError if the embedding, the head or the last norm is all zeros; warn of others.

    An interrupted download leaves zeros in a file of the right size. Other matrices are zeros, or
    end in zeros, in a few models that are meant to be so.
    """
    by_source = {each.source: each for each in found}
    texts = []
    for source, each in by_source.items():
        name = checkpoint.name_in_file(source)
        part = "" if each.is_whole else f"{each.num_zeros} of {each.num_rows} rows of "
        texts.append(f"{part}{name}")
    if not texts:
        return
    message = (
        f"{checkpoint.place}: all zeros, as an interrupted download leaves them, are "
        f"{', '.join(first_few(texts))}; {AGAIN}"
    )
    if any(each.is_whole and _is_of(source, ENDS) for source, each in by_source.items()):
        raise ValueError(message)
    warnings.warn(f"{message}, unless the model is meant to be so", stacklevel=2)


def some_values(values: torch.Tensor) -> torch.Tensor:
    """At most SEEN_VALUES indices of each dimension, the last among them: a view."""
    steps = ((size, -(-size // SEEN_VALUES)) for size in values.shape)
    return values[tuple(slice((size - 1) % step, None, step) for size, step in steps)]


def _is_of(source: str, modules: tuple[str, ...]) -> bool:
    """Whether a tensor belongs to one of these modules, outside the layers."""
    return ".layers." not in source and source.rpartition(".")[0].endswith(modules)
