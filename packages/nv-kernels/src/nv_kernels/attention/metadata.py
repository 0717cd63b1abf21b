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
    """How a layer attends: always causally, and with the features that are not at their default.

    It holds numbers only, so that a config can hold it and layers with equal specs are equal. The
    values of the sinks are weights of the layer, with a device and a part for each rank; `attend`
    takes them as an argument.

    Attributes:
        scale: multiplies q.k; positive.
        window: a row reads the last `window` of the keys up to its own position, itself included;
            None: all of them.
        softcap: a score becomes softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118);
            None: it stays as it is.
        sinks: each query head has a logit that joins the sum of its softmax and has no value
            (gpt-oss, arXiv 2508.10925).

    Raises:
        ValueError: a window below 1, or a softcap that is not positive.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features that are in use."""
        used = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks or None}
        return tuple(name for name, value in used.items() if value is not None)

    def __post_init__(self) -> None:
        """Check the features' values."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention's window is {self.window}: it must be at least 1, or None")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"attention's softcap is {self.softcap}: it must be positive, or None")


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
