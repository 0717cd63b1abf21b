"""Picks an attention backend by name, or by device.

Owns the list of backends: a new one is a file and a line here. Never imports a backend that is not
used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, cast

import torch

from nv_kernels.attention.metadata import AttentionShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nv_kernels.attention.metadata import AttentionSpec
    from nv_kernels.attention.protocol import AttentionBackend

# name -> module and class, built as Class(shape, reason).
BACKENDS = {
    "triton": ("nv_kernels.attention.triton.backend", "TritonAttention"),
    "cpu": ("nv_kernels.attention.cpp", "CPUAttention"),
    "torch": ("nv_kernels.attention.torch", "TorchAttention"),
    "flash_attn": ("nv_kernels.attention.flash", "FlashAttention"),
    "batch_invariant": (
        "nv_kernels.attention.batch_invariant_torch",
        "BatchInvariantTorchAttention",
    ),
}
BACKEND_NAMES = ("auto", *BACKENDS)
BATCH_INVARIANT_ON_A_CARD = (
    "nv_kernels.attention.triton.batch_invariant",
    "BatchInvariantTritonAttention",
)
ONLY_ON = {"triton": "cuda", "flash_attn": "cuda", "cpu": "cpu"}


def attention_backend(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    specs: Iterable[AttentionSpec] = (),
) -> AttentionBackend:
    """Build the backend for one shape of attention.

    Args:
        name: "auto", "triton", "cpu", "torch", "flash_attn" or "batch_invariant".
        device: where the tensors will live.
        dtype: of queries and output.
        num_q_heads: Hq of this rank.
        num_kv_heads: Hkv of this rank.
        head_dim: D.
        block_size: tokens per block.
        specs: how the model's layers attend; "auto" takes a backend that computes all of them.

    Returns:
        The backend; its `.reason` explains the choice.

    Raises:
        ValueError: an unknown name, a backend that cannot run on the device or does not compute a
            feature of the specs, a size below 1, a dtype that queries cannot have, or heads that
            do not divide.
        NotImplementedError: a known backend that this version does not have.
    """
    if name not in BACKEND_NAMES:
        choices = ", ".join(BACKEND_NAMES)
        raise ValueError(f"attention backend is {name!r}: it must be one of {choices}")
    sizes = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
    sizes |= {"head_dim": head_dim, "block_size": block_size}
    for what, size in sizes.items():
        if size < 1:
            raise ValueError(f"{what} is {size}: it must be at least 1")
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"dtype is {dtype!r}: it must be the queries', a floating-point torch.dtype"
        )
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads is {num_q_heads}: it must be a multiple of num_kv_heads, {num_kv_heads}; "
            "both count the heads of one rank"
        )
    device = torch.device(device)
    if ONLY_ON.get(name, device.type) != device.type:
        raise ValueError(
            f"device is {device.type!r}: attention backend {name!r} needs a {ONLY_ON[name]} "
            "device; use 'torch' or 'auto'"
        )
    shape = AttentionShape(device, dtype, num_q_heads, num_kv_heads, head_dim, block_size)
    specs = tuple(dict.fromkeys(specs))
    if name == "auto":
        return _automatic(shape, specs)
    return _build(name, "asked for by name", shape, specs)


def _automatic(shape: AttentionShape, specs: Sequence[AttentionSpec]) -> AttentionBackend:
    """Pick the device's own kernels; if they do not take the shape, the reason names the cause."""
    device = shape.device.type
    own = {"cuda": "triton", "cpu": "cpu"}.get(device)
    reason = f"auto: the device is {device!r}, and only 'torch' runs there"
    if own is not None:
        try:
            return _build(own, f"auto: the device is {device!r}", shape, specs)
        except (ValueError, NotImplementedError) as error:  # the kernels do not support it
            reason = f"auto: {error}"
    if device == "cpu" and shape.dtype == torch.float32:
        exact = f"{reason}; in fp32 its bits do not depend on the batch"
        return _build("batch_invariant", exact, shape, specs)
    return _build("torch", reason, shape, specs)


def _build(
    name: str, reason: str, shape: AttentionShape, specs: Sequence[AttentionSpec]
) -> AttentionBackend:
    backend = _of_shape(name, reason, shape)
    for spec in specs:
        if refusal := backend.refusal(spec):
            raise ValueError(refusal)
    return backend


def _of_shape(name: str, reason: str, shape: AttentionShape) -> AttentionBackend:
    module, cls = BACKENDS[name]
    if importlib.util.find_spec(module) is None:
        raise NotImplementedError(f"attention backend {name!r} is not built yet; use 'auto'")
    if name == "batch_invariant" and shape.device.type == "cuda":
        module, cls = BATCH_INVARIANT_ON_A_CARD
    if name == "batch_invariant" and shape.device.type == "cpu":
        try:
            return _load(*BACKENDS["cpu"], shape, reason, name)  # which computes each row alone
        except ValueError:  # without a C++ kernel for the machine or the shape, use torch's ops
            pass
    return _load(module, cls, shape, reason)


def _load(module: str, cls: str, *arguments: AttentionShape | str) -> AttentionBackend:
    return cast("AttentionBackend", vars(importlib.import_module(module))[cls](*arguments))
