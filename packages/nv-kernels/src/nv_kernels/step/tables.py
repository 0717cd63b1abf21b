"""The state of running sequences on the device, and the inputs that a step reads from it.

`nv_kernels.step.rows` defines the ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

FROM_SLOT = -1
"""In the token ids and starts of `step_rows`: read the value from the row's slot."""


@dataclass(frozen=True)
class RowTables:
    """State of N sequences, one row per sequence. The number of a row is its slot.

    Attributes:
        last_token: [N] int64, the newest token, which is not computed yet.
        computed: [N] int32, tokens whose keys and values are in the cache.
        block_table: [N, W] int32.
        floats: [N, 3] fp32: temperature, top_p, min_p.
        integers: [N, 3] int64: top_k, seed, and one column that these ops do not use.
    """

    last_token: torch.Tensor
    computed: torch.Tensor
    block_table: torch.Tensor
    floats: torch.Tensor
    integers: torch.Tensor


class StepRows(NamedTuple):
    """The inputs of one step with S rows and T tokens in all.

    Attributes:
        token_ids: [T] int64, the tokens to compute.
        positions: [T] int64, their positions in their sequences; 0 for tokens of no row.
        slot_mapping: [T] int64, cache slots: block * block_size + offset; -1 for tokens of padding
            or of no row.
        query_start: [S+1] int32, index of each row's first token.
        lengths: [S] int64, position of the token to be drawn.
        last: [S] int64, index of each row's last token among the T; any index for an empty row.
        context_lens: [S] int32, this step's tokens included; 0 for padding rows.
        block_tables: [S, W] int32; entries past a row's last block are undefined.
        temperature: [S] fp32.
        top_p: [S] fp32.
        min_p: [S] fp32.
        top_k: [S] int32.
        seeds: [S] int64.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor


@dataclass(frozen=True)
class TokenRing:
    """A ring buffer of drawn tokens for the host: step number c writes entry c % C.

    Attributes:
        entries: [C, R] int64; on a card, pinned host memory that the card writes to.
        count: [1] int64, steps written so far, on the device.
    """

    entries: torch.Tensor
    count: torch.Tensor
