"""A decoder layer's weights, and the residual stream that passes through it.

Owns the records that the chain's two versions share. Never computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from nv_kernels.ranks.peers import PeerBuffers

Reduce: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer's weights that are not attention's own.

    Attributes:
        attention_norm: [E].
        qkv: [(Hq + 2 Hkv) D, E].
        output: [E, Hq D].
        mlp_norm: [E].
        gate_up: [2F, E], gate rows then up rows.
        down: [E, F].
        eps: of both norms.
        qkv_bias: [(Hq + 2 Hkv) D] or None.
        output_bias: [E] or None; with tensor parallelism on one rank only.
        gate_up_bias: [2F] or None.
        down_bias: [E] or None; with tensor parallelism on one rank only.
        batch_invariant: a token's result is bitwise the same whatever the others are.
        prepared: what a device's version keeps with it, by the version's name.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    eps: float
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    batch_invariant: bool = False
    prepared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


class Stream(NamedTuple):
    """The residual stream between two ops.

    Attributes:
        hidden: [T, E].
        pending: still to be added: None, [T, E], or [P, T, E] partials.
        peers: what is pending is this rank's part, and the norm sums it over these; or None.
    """

    hidden: torch.Tensor
    pending: torch.Tensor | None = None
    peers: PeerBuffers | None = None
