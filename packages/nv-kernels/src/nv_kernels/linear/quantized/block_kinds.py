"""The blocks of GGUF files (llama.cpp's ggml): for each kind its sizes, and how it is unpacked.

Owns the table BLOCK_KINDS. All numbers of a block are little-endian; d, m, dmin are fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Unpacked(NamedTuple):
    """Blocks in parts: a value is scale * q + offset.

    Attributes:
        q: uint8 [B, values].
        scale: fp32 [B, groups].
        offset: fp32 [B, groups], or None: -scale * the kind's `zero`.
    """

    q: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None


@dataclass(frozen=True)
class BlockKind:
    """One kind of block.

    Attributes:
        num_values: values per block.
        num_bytes: bytes per block.
        group_size: values per scale.
        zero: the code of 0, or None where each group has an offset of its own.
        bits: the fewest bits of `Grouped` (4 or 8) that hold a code.
        unpack: takes blocks apart, uint8 [B, num_bytes].
    """

    num_values: int
    num_bytes: int
    group_size: int
    zero: int | None
    bits: int
    unpack: Callable[[torch.Tensor], Unpacked]


def _halves(blocks: torch.Tensor, first: int, count: int = 1) -> torch.Tensor:
    """Read fp16 numbers from byte `first` on: [B, count] fp32."""
    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(qs: torch.Tensor) -> torch.Tensor:
    """Unpack [..., n] bytes to [..., 2n]: all low halves, then all high ones."""
    return torch.cat((qs & 15, qs >> 4), dim=-1)


def _bits(qh: torch.Tensor) -> torch.Tensor:
    """Unpack [B, 4] bytes to [B, 32] bits, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=qh.device)
    return (qh[..., None] >> shifts & 1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> Unpacked:
    return Unpacked(_nibbles(blocks[:, 2:]), _halves(blocks, 0), None)


def _q4_1(blocks: torch.Tensor) -> Unpacked:
    return Unpacked(_nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Unpacked:
    q = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return Unpacked(q, _halves(blocks, 0), None)


def _q5_1(blocks: torch.Tensor) -> Unpacked:
    q = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return Unpacked(q, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Unpacked:
    return Unpacked(blocks[:, 2:] ^ 128, _halves(blocks, 0), None)  # q + 128 of signed bytes


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack 12 bytes [B, 12] to 8 scales and 8 mins of 6 bits, fp32 [B, 8]."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=1)
    mins = torch.cat((mid & 63, high >> 4 | mid >> 6 << 4), dim=1)
    return scales.float(), mins.float()


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales, mins = _six_bits(blocks[:, 4:16])
    return _halves(blocks, 0) * scales, -_halves(blocks, 2) * mins


def _q4_k(blocks: torch.Tensor) -> Unpacked:
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))  # a byte has values of two groups
    return Unpacked(q.flatten(1), *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> Unpacked:
    q = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = blocks[:, None, 16:48] >> shifts & 1  # bit s of byte j is of value j in group s
    return Unpacked((q | fifth << 4).flatten(1), *_k_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> Unpacked:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    scales = blocks[:, 192:208].view(torch.int8).float()
    return Unpacked((low | high << 4).flatten(1), _halves(blocks, 208) * scales, None)


BLOCK_KINDS = {
    "Q4_0": BlockKind(32, 18, 32, 8, 4, _q4_0),
    "Q4_1": BlockKind(32, 20, 32, None, 4, _q4_1),
    "Q5_0": BlockKind(32, 22, 32, 16, 8, _q5_0),
    "Q5_1": BlockKind(32, 24, 32, None, 8, _q5_1),
    "Q8_0": BlockKind(32, 34, 32, 128, 8, _q8_0),
    "Q4_K": BlockKind(256, 144, 32, None, 4, _q4_k),
    "Q5_K": BlockKind(256, 176, 32, None, 8, _q5_k),
    "Q6_K": BlockKind(256, 210, 16, 32, 8, _q6_k),
}
