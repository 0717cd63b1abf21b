"""Groups a step's sequences so that the torch backend needs few calls a layer.

Owns the index tensors and masks of a step, made once and shared by all layers. Never touches
keys or values.

A sequence's keys are those of its context that some query of the step reads: all, or with a window
the last ones.

Sequences with one query are grouped with others of similar length. A group is padded to its longest
member, and a padded place points at the sequence's own first key, so that values of another
sequence, which may be NaN, are never read. One call per sequence would cost too many calls for
short contexts; one call for all sequences would cost too much padding for mixed lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nv_kernels.attention.causal_mask import CausalMask, aligned_width

if TYPE_CHECKING:
    from nv_kernels.attention.metadata import AttentionMetadata

MAX_GROUP_TOKENS = 4096  # keys of a group, padding included: they fit the core's cache
MAX_GROUP_PADDING = 512  # padded keys that cost about as much as one more group
MAX_TILE_QUERIES = 256  # queries of a chunk per call, which share a mask


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one query each, attended in one call.

    Attributes:
        rows: where their queries lie in `Grouping.rows`; N of them.
        num_tokens: C, keys per sequence, padding included.
        slots: [N * C] cache slots, or a slice of them for one sequence in consecutive blocks.
        mask: [N, 1, 1, C], 0 or -inf, each row aligned (`causal_mask`); None without
            padding.
    """

    rows: slice
    num_tokens: int
    slots: torch.Tensor | slice
    mask: torch.Tensor | None


@dataclass(frozen=True)
class PromptChunk:
    """One sequence with several queries, which are the last tokens of its context.

    Attributes:
        rows: where its queries lie in `Grouping.rows`.
        slots: [C] cache slots, or a slice of them where the blocks are consecutive.
        mask: the step's mask, which all its chunks share.
    """

    rows: slice
    slots: torch.Tensor | slice
    mask: CausalMask


@dataclass(frozen=True)
class Grouping:
    """A step, grouped.

    Attributes:
        rows: [Q] query rows that have keys, in the order of the groups; None: the first Q rows,
            in their own order.
        decodes: groups of sequences with one query.
        chunks: the other sequences.
        window: keys that a query reads at most; None: all.
    """

    rows: torch.Tensor | None
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[PromptChunk, ...]
    window: int | None


@dataclass(frozen=True)
class _Sequence:
    index: int
    query_start: int
    query_len: int
    context_len: int
    first_key: int  # the first position that a query reads

    @property
    def num_keys(self) -> int:
        return self.context_len - self.first_key


def group(
    metadata: AttentionMetadata, block_size: int, dtype: torch.dtype, window: int | None = None
) -> Grouping:
    """Group a step. Reads the metadata on the host: on a GPU this waits for the device.

    Args:
        metadata: the step's.
        block_size: tokens per block.
        dtype: of the masks: the queries'.
        window: keys that a query reads at most; None: all.

    Returns:
        The grouping; sequences without a query or a context are left out.
    """
    sequences = _sequences(metadata, window)
    singles = sorted((s for s in sequences if s.query_len == 1), key=lambda s: -s.num_keys)
    longer = [s for s in sequences if s.query_len > 1]
    tables = metadata.block_tables
    order: list[int] = []
    decodes, chunks = [], []
    for members in _split(singles):
        rows = _append(order, members)
        slots, padding = _padded(members, tables, block_size, dtype)
        decodes.append(DecodeGroup(rows, max(s.num_keys for s in members), slots, padding))
    mask = _causal_mask(longer, dtype, tables.device, window)
    for sequence in longer:
        rows = _append(order, [sequence])
        slots = _slots(sequence, tables, block_size)
        chunks.append(PromptChunk(rows, slots, mask))
    rows_of_groups = None
    if order != list(range(int(metadata.query_start[-1]))):
        rows_of_groups = torch.tensor(order, dtype=torch.int64, device=tables.device)
    return Grouping(rows_of_groups, tuple(decodes), tuple(chunks), window)


def _sequences(metadata: AttentionMetadata, window: int | None) -> list[_Sequence]:
    starts = metadata.query_start.tolist()
    found = []
    for index, context_len in enumerate(metadata.context_lens.tolist()):
        query_len = starts[index + 1] - starts[index]
        reach = context_len if window is None else query_len + window - 1
        first_key = max(0, context_len - reach)
        if query_len > 0 and context_len > 0:
            found.append(_Sequence(index, starts[index], query_len, context_len, first_key))
    return found


def _append(order: list[int], members: list[_Sequence]) -> slice:
    first = len(order)
    for member in members:
        order.extend(range(member.query_start, member.query_start + member.query_len))
    return slice(first, len(order))


def _split(sequences: list[_Sequence]) -> list[list[_Sequence]]:
    """Split sequences, longest first, where padding or size would cost more than another call."""
    groups: list[list[_Sequence]] = []
    padding = 0
    for sequence in sequences:
        if groups:
            longest = groups[-1][0].num_keys
            padding += longest - sequence.num_keys
            size = (len(groups[-1]) + 1) * longest
            if padding <= MAX_GROUP_PADDING and size <= MAX_GROUP_TOKENS:
                groups[-1].append(sequence)
                continue
        groups.append([sequence])
        padding = 0
    return [sorted(group, key=lambda s: s.query_start) for group in groups]


def _padded(
    members: list[_Sequence], tables: torch.Tensor, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor | slice, torch.Tensor | None]:
    """Return the slots [N * C] of N sequences and the mask [N, 1, 1, C] of their padding."""
    if len(members) == 1:
        return _slots(members[0], tables, block_size), None
    device = tables.device
    index = torch.tensor([s.index for s in members], device=device)
    lengths = torch.tensor([s.num_keys for s in members], device=device)[:, None]
    first = torch.tensor([s.first_key for s in members], device=device)[:, None]
    longest = max(s.num_keys for s in members)
    places = torch.arange(longest, device=device)  # [C]
    padding = places >= lengths  # [N, C]
    places = first + places.expand_as(padding).masked_fill(padding, 0)
    blocks = tables[index].gather(1, places // block_size).long()  # [N, C]
    slots = (blocks * block_size + places % block_size).flatten()
    if all(s.num_keys == longest for s in members):
        return slots, None
    mask = torch.zeros(len(members), 1, 1, aligned_width(longest), dtype=dtype, device=device)
    mask = mask[..., :longest]  # [N, 1, 1, C]
    return slots, mask.masked_fill_(padding[:, None, None], float("-inf"))


def _slots(sequence: _Sequence, tables: torch.Tensor, block_size: int) -> torch.Tensor | slice:
    """Return the slots of a sequence's C keys; a slice, if they are adjacent."""
    first_block, skipped = divmod(sequence.first_key, block_size)
    blocks = tables[sequence.index, first_block : -(-sequence.context_len // block_size)].long()
    if len(blocks) == 1 or bool((blocks.diff() == 1).all()):
        first = int(blocks[0]) * block_size + skipped
        return slice(first, first + sequence.num_keys)
    offsets = torch.arange(block_size, device=tables.device)
    slots = blocks[:, None] * block_size + offsets  # [num_blocks, block_size]
    return slots.flatten()[skipped : skipped + sequence.num_keys]


def _causal_mask(
    sequences: list[_Sequence], dtype: torch.dtype, device: torch.device, window: int | None
) -> CausalMask:
    """Make the mask that all chunks of a step share."""
    tile = min(MAX_TILE_QUERIES, max((s.query_len for s in sequences), default=0))
    width = max((s.num_keys for s in sequences), default=0)
    if window is not None:
        width = min(width, tile + window - 1)
    return CausalMask.make(tile, width, dtype, device, window)
