"""Codes of several bits in words: the packing that AWQ, GPTQ and compressed-tensors share.

Owns fields that lie one after the other from the lowest bit on. Never knows a format's order.
"""

import torch


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words [..., n] int32 -> their fields [..., 32 n / bits] uint8, the lowest first."""
    # flat, as a single column counts as contiguous whatever its stride, and has no view of bytes
    flat = words.contiguous().flatten().view(torch.uint8)
    fields = flat.view(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 8:
        return fields
    return torch.stack((fields & 15, fields >> 4), -1).flatten(-2)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits [N, K] uint8 -> [N, K / 2], the even column in the low half of a byte."""
    return codes[:, ::2] | codes[:, 1::2] << 4
