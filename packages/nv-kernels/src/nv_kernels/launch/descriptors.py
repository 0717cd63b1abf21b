"""Descriptors of tensors for Hopper's bulk copy engine, as a Gluon kernel takes them.

Deriving the layout of a box in shared memory takes longer than a launch, so each is derived once.
Imports Gluon: import this module only as `linear.triton.product` does, or on a Hopper card.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ELEMENTS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
}


def describe(tensor: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """Describe a tensor for copies of one box at a time.

    Args:
        tensor: bf16, fp16, e4m3 or int8, last dimension contiguous, 16-byte aligned.
        box: elements per copy in each dimension.

    Returns:
        The descriptor, with the box swizzled for wgmma.
    """
    return TensorDescriptor.from_tensor(tensor, box, _layout(tuple(box), tensor.dtype))


@cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), ELEMENTS[dtype])
