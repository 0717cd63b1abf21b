"""The paged KV cache of one layer: its shape, its order in memory, its size.

Owns the layout of a block. nv-cache decides which sequence a block belongs to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

Order = Literal["NHD", "HND"]
FP8 = torch.float8_e4m3fn


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View e4m3 as bytes, which torch indexes on every device; other dtypes are not changed."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer, as views that hide the order in memory.

    Attributes:
        k: [num_blocks, block_size, Hkv, D], any strides, D contiguous.
        v: as `k`.
        k_scale: a stored key times this is the key (1 unless the cache is fp8).
        v_scale: as `k_scale`, for values.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def device(self) -> torch.device:
        """The device of the cache."""
        return self.k.device

    @property
    def is_fp8(self) -> bool:
        """True if the elements are e4m3: a value is its scale times the element."""
        return self.k.dtype == FP8

    def loaded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as Triton's attention kernels load them: e4m3 as int16 pairs."""
        if self.is_fp8:
            return self.k.view(torch.int16), self.v.view(torch.int16)
        return self.k, self.v

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as Triton's kernels write them: e4m3 as bytes."""
        assert self.k.stride() == self.v.stride(), "keys and values must have equal strides"
        assert self.k.stride(3) == 1, "a head's elements must be contiguous"
        return as_bytes(self.k), as_bytes(self.v)

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """Two addresses, the strides of a block, a token and a head, and the block size."""
        strides = self.k.stride()
        assert self.v.stride() == strides, "keys and values must have equal strides"
        assert strides[3] == 1, "a head's elements must be contiguous"
        return self.k.data_ptr(), self.v.data_ptr(), *strides[:3], self.k.shape[1]


@dataclass(frozen=True)
class KVLayout:
    """The layout of one layer's cache, which the attention backend chooses.

    Attributes:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        num_kv_heads: Hkv of this rank.
        head_dim: D.
        dtype: element type; torch.float8_e4m3fn stores values divided by a scale.
        order: "NHD" keeps a token's heads together, "HND" a head's tokens of a block.
    """

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    order: Order

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values together."""
        elements = self.block_size * self.num_kv_heads * self.head_dim
        return 2 * elements * self.dtype.itemsize

    def allocate(self, device: torch.device | str) -> KVCache:
        """Allocate the pool with zeros: a slot that was never written must not hold a NaN.

        Args:
            device: the device of the memory.

        Returns:
            Two views [num_blocks, block_size, Hkv, D] of fresh memory, scales 1.
        """
        inner = (self.block_size, self.num_kv_heads)
        if self.order == "HND":
            inner = (self.num_kv_heads, self.block_size)
        shape = (2, self.num_blocks, *inner, self.head_dim)
        pool = _zeros(shape, self.dtype, torch.device(device))
        if self.order == "HND":
            pool = pool.transpose(2, 3)  # [2, num_blocks, block_size, Hkv, D]
        return KVCache(k=pool[0], v=pool[1])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros; on a CPU the system zeroes a page when it is first used.

    torch.zeros would write a CPU pool of gigabytes at once, which takes seconds.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
