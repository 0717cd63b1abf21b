"""The adapter of each token of a step, and the order in which the products visit the tokens.

Owns the record and its shapes, which depend on the number of tokens and of adapters alone: the host
never reads which adapter a token has, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nv_kernels.launch.sizes import cdiv
from nv_kernels.linear.experts.routing import num_tiles
from nv_kernels.op import op

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

NO_ADAPTER = -1
FEW = 256
"""A step of at most so many tokens has tiles of LOW on a card, a larger one of HIGH."""
LOW, HIGH = 16, 64


class LoraPlan(NamedTuple):
    """The tokens of a step, sorted by adapter; made once and read by every layer.

    Attributes:
        adapters: [T] int32, the adapter of each token; NO_ADAPTER: the base model's own.
        places: [P * tile] int32, the tokens in P tiles: a tile has tokens of one adapter in
            ascending order, padded with -1. Tokens without an adapter are in the last tiles.
        tile_adapters: [P] int32, the adapter of each tile; NO_ADAPTER: none.
        present: [S + 1] int32, how many adapters the tokens have together, and then these,
            ascending. The rest is undefined.
        ready: [2] int32 zeros, by which the programs of a kernel wait for each other; they leave
            zeros again.
        tile: tokens per tile.
        num_adapters: S, above every adapter.
        is_batch_invariant: a token's bits must not depend on the other tokens: neither tiles nor
            splits of a sum may depend on their number.
        on_host: what `groups` returns, if the host knows it: on a CPU.
    """

    adapters: torch.Tensor
    places: torch.Tensor
    tile_adapters: torch.Tensor
    present: torch.Tensor
    ready: torch.Tensor
    tile: int
    num_adapters: int
    is_batch_invariant: bool = False
    on_host: tuple[tuple[int, torch.Tensor], ...] | None = None

    def of_rows(self, index: torch.Tensor) -> LoraPlan:
        """The plan of some of the tokens, [R] by number: of the rows of a head, for example."""
        adapters, is_invariant = self.adapters[index], self.is_batch_invariant
        device = adapters.device.type
        tile = lora_tile(len(adapters), device, is_batch_invariant=is_invariant)
        return lora_plan(adapters, self.num_adapters, tile, is_invariant)

    def groups(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each tile that has an adapter, and its tokens [n] int64; waits for the device."""
        if self.on_host is not None:
            yield from self.on_host
            return
        tiles = self.places.view(-1, self.tile)
        for adapter, places in zip(self.tile_adapters.tolist(), tiles, strict=True):
            if adapter != NO_ADAPTER:
                yield adapter, places[places >= 0].long()


def lora_tile(num_tokens: int, device_type: str, *, is_batch_invariant: bool = False) -> int:
    """Return the tokens per tile that the products read fastest.

    Args:
        num_tokens: T.
        device_type: on a CPU the tokens of an adapter are one tile.
        is_batch_invariant: as in `LoraPlan`.
    """
    if device_type == "cpu":
        return max(num_tokens, 1)
    return LOW if is_batch_invariant or num_tokens <= FEW else HIGH


@op(triton="nv_kernels.linear.lora.triton_plan")
def lora_plan(
    adapters: torch.Tensor, num_adapters: int, tile: int, is_batch_invariant: bool = False
) -> LoraPlan:
    """Sort the tokens of a step by adapter.

    Args:
        adapters: [T] int32, each NO_ADAPTER or in [0, S).
        num_adapters: S.
        tile: tokens per tile, as `lora_tile` chooses.
        is_batch_invariant: as in `LoraPlan`.
    """
    tiles = num_tiles(len(adapters), num_adapters + 1, tile)
    places = adapters.new_full((tiles, tile), -1)
    tile_adapters = adapters.new_full((tiles,), NO_ADAPTER)
    present = adapters.new_full((num_adapters + 1,), NO_ADAPTER)
    first, found = 0, []
    for adapter in (*range(num_adapters), NO_ADAPTER):
        tokens = (adapters == adapter).nonzero()[:, 0].int()
        last = first + cdiv(len(tokens), tile)
        places[first:last].view(-1)[: len(tokens)] = tokens
        tile_adapters[first:last] = adapter
        first = last
        if len(tokens) and adapter != NO_ADAPTER:
            found.append(adapter)
    present[0] = len(found)
    present[1 : len(found) + 1] = adapters.new_tensor(found)
    ready = adapters.new_zeros(2)
    plan = LoraPlan(
        adapters, places.view(-1), tile_adapters, present, ready, tile, num_adapters,
        is_batch_invariant,
    )  # fmt: skip
    if adapters.device.type == "cpu":
        plan = plan._replace(on_host=tuple(plan.groups()))
    return plan
