"""The arguments of attention: the shape a backend is built for, how a layer attends, and a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttentionShape:
    """The shape of attention that a backend is built for.

    Attributes:
        device: where the tensors live.
        dtype: of queries and output.
        num_q_heads: Hq of this rank, a multiple of num_kv_heads.
        num_kv_heads: Hkv of this rank.
        head_dim: D.
        block_size: tokens per block.
    """

    device: torch.device
    dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer attends: always causally. A window, a softcap or sinks will stand here.

    Attributes:
        scale: multiplies q.k; positive.
    """

    scale: float


@dataclass(frozen=True)
class AttentionMetadata:
    """Which queries and which blocks belong to which of a step's S sequences.

    Attributes:
        query_start: [S+1] int32; sequence i owns query rows query_start[i] to query_start[i+1].
        context_lens: [S] int32, this step's tokens included; 0 for an empty row, whose output is 0.
        block_tables: [S, W] int32; entries past a sequence's last block are never read.
        max_query_len: host bound on the query lengths (a bucket's, not the exact value).
        max_context_len: host bound on the context lengths.
        num_decodes: the first num_decodes sequences have one query row each.
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int
