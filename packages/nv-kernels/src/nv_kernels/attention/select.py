"""Picks an attention backend by name, or by what the machine offers.

Owns the list of backends: adding one is a file and a line. Never imports one that is not asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, cast

import torch

from nv_kernels.metadata import AttentionShape

if TYPE_CHECKING:
    from nv_kernels.attention.base import AttentionBackend

# name -> module and class, built as Class(shape, reason).
BACKENDS = {
    "triton": ("nv_kernels.attention.triton", "TritonAttention"),
    "torch": ("nv_kernels.attention.torch", "TorchAttention"),
    "flash_attn": ("nv_kernels.attention.flash", "FlashAttention"),
    "batch_invariant": ("nv_kernels.attention.batch_invariant", "batch_invariant_attention"),
}
CUDA_ONLY = ("triton", "flash_attn")


def attention_backend(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> AttentionBackend:
    """Build the backend for one shape of attention.

    Args:
        name: "auto", "triton", "torch", "flash_attn" or "batch_invariant".
        device: where the tensors will live.
        dtype: of queries and output.
        num_q_heads: Hq of this rank.
        num_kv_heads: Hkv of this rank.
        head_dim: D.
        block_size: tokens a block.

    Returns:
        The backend; its `.reason` says why it was picked.

    Raises:
        ValueError: an unknown name, a backend that cannot run on the device, or heads that do
            not divide.
        NotImplementedError: a known backend that this version does not have.
    """
    if name != "auto" and name not in BACKENDS:
        choices = ", ".join(("auto", *BACKENDS))
        raise ValueError(f"attention backend {name!r} is unknown; choose one of {choices}")
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads {num_q_heads} is not a multiple of num_kv_heads {num_kv_heads}; "
            "give both as one rank holds them"
        )
    device = torch.device(device)
    if name in CUDA_ONLY and device.type != "cuda":
        raise ValueError(
            f"attention backend {name!r} needs a CUDA device, not {device.type!r}; "
            "use 'torch' or 'auto' there"
        )
    shape = AttentionShape(device, dtype, num_q_heads, num_kv_heads, head_dim, block_size)
    if name == "auto":
        return _automatic(shape)
    return _build(name, "asked for by name", shape)


def _automatic(shape: AttentionShape) -> AttentionBackend:
    if shape.device.type != "cuda":
        kind = shape.device.type
        if shape.dtype == torch.float32:
            return _build("batch_invariant", f"auto: fp32 on {kind!r} is exact in any batch", shape)
        return _build("torch", f"auto: the device is {kind!r}, which the others cannot use", shape)
    try:
        return _build("triton", "auto: the device is a CUDA card", shape)
    except (ValueError, NotImplementedError) as error:  # a shape that it was not written for
        return _build("torch", f"auto: {error}", shape)


def _is_built(name: str) -> bool:
    return importlib.util.find_spec(BACKENDS[name][0]) is not None


def _build(name: str, reason: str, shape: AttentionShape) -> AttentionBackend:
    if not _is_built(name):
        raise NotImplementedError(f"attention backend {name!r} is not built yet; use 'auto'")
    module, cls = BACKENDS[name]
    return cast("AttentionBackend", vars(importlib.import_module(module))[cls](shape, reason))
