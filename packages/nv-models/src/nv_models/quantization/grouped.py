"""The parts that all schemes of codes in groups of columns share.

Owns the sorting for files whose groups follow an order of activations, and the bytes of a record.
Never reads a file.
"""

from collections.abc import Mapping
from typing import Any

import torch

from nv_models.fields import size
from nv_models.quantization.bits import pack_pairs
from nv_models.quantization.form import Axis, Region

CARD_ZEROS = torch.int16
"""The type of zero points on a card; in a record they are uint8."""


def read_group_size(config: Mapping[str, Any], *names: str) -> int | None:
    """The columns per scale; None: all of them, which files write as -1.

    Args:
        config: of the scheme.
        names: of the field, of which the first that is there counts.
    """
    name = next((each for each in names if config.get(each) is not None), names[0])
    return None if config.get(name) == -1 else size(config, name)


def group_axis(group_size: int | None) -> Axis | int:
    """The dimension of a stored tensor that follows the groups of columns."""
    return 1 if group_size is None else Axis("columns", group_size)


def sorted_columns(
    codes: torch.Tensor, bits: int, groups: torch.Tensor, num_groups: int, region: Region
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sort columns by their group; those of one group keep their order.

    Args:
        codes: [N, K] of 8 bits, or [N, K / 2] of 4, as `nk.Grouped` has them.
        bits: of a code.
        groups: [K], the group of each column.
        num_groups: each of which has scales.
        region: of the matrix, for errors.

    Returns:
        The sorted codes, and the column of x that each multiplies: [K] int32, or None if they were
        in order.

    Raises:
        ValueError: a column has a group without scales, or groups differ in size.
    """
    first = int(groups.min())
    last = int(groups.max())  # a rank's share begins at a later group
    if last - first + 1 != num_groups or first < 0 or (region.has_all_columns and first):
        raise ValueError(
            f"{region.module} has columns of the groups {first} to {last}, and scales of "
            f"{num_groups} groups: download the checkpoint again"
        )
    order = groups.argsort(stable=True)
    counts = torch.bincount(groups - first, minlength=num_groups)
    if counts.min() != counts.max():
        raise ValueError(
            f"{region.module} has groups of {int(counts.min())} to {int(counts.max())} columns: "
            "they must be of one size; download the checkpoint again"
        )
    if torch.equal(order, torch.arange(len(order), device=order.device)):
        return codes, None
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[:, order]
        return pack_pairs(codes), order.int()
    return codes[:, order], order.int()


def grouped_bytes(
    region: Region,
    bits: int,
    group_size: int | None,
    scale: torch.dtype,
    offset: torch.dtype | None,
    *,
    has_order: bool = False,
) -> int:
    """Bytes of a `nk.Grouped` of a region.

    Args:
        region: of the matrix.
        bits: of a code.
        group_size: columns per scale; None: all of a row's.
        scale: dtype of the scales.
        offset: dtype of the offsets; None: there are none.
        has_order: columns are sorted by their groups.
    """
    rows, columns = region.kept
    groups = columns // group_size if group_size else 1
    per_group = scale.itemsize + (offset.itemsize if offset else 0)
    return rows * columns * bits // 8 + rows * groups * per_group + 4 * columns * has_order
