"""Picks an op's implementation by the device of its first argument.

Owns the tables of Triton's and the CPU's ops and nothing else. Never imports Triton before a CUDA
tensor comes, nor compiles the CPU's kernels before a CPU's tensor does.
"""

from __future__ import annotations

import importlib
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from nv_kernels import reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

# Where an op's Triton version lives: nv_kernels.triton.<module>, under the op's own name.
# An op that is not listed runs its definition on CUDA tensors too.
TRITON_OPS = {
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "all_reduce_add_rms_norm": "all_reduce",
    "silu_and_mul": "activation",
    "batch_invariant_silu_and_mul": "activation",
    "linear": "linear",
    "logits": "logits",
    "batch_invariant_linear": "batch_invariant_linear",
    "batch_invariant_logits": "batch_invariant_linear",
    "batch_invariant_partials": "batch_invariant_linear",
    "apply_rope": "rope_store",
    "store_kv": "rope_store",
    "qk_norm_rope_store": "rope_store",
    "copy_blocks": "copy_blocks",
    "sample": "sampling",
    "shape_logits": "controls",
    "top_logprobs": "top_logprobs",
    "decode_rows": "rows",
    "keep_tokens": "rows",
    "prompt_rows": "prompt_rows",
}

# What `nv_kernels.cpu.ops` has of its own.
CPU_OPS = (
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
    "batch_invariant_silu_and_mul",
    "pack_weight",
    "pack_head",
    "linear",
    "logits",
    "batch_invariant_linear",
    "batch_invariant_logits",
    "batch_invariant_partials",
    "apply_rope",
    "qk_norm_rope_store",
    "sample",
)


class OnDevice(Protocol):
    """A tensor or a KV cache."""

    @property
    def device(self) -> torch.device:
        """Where it lives."""


First = TypeVar("First", bound=OnDevice)
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def dispatched(
    definition: Callable[Concatenate[First, Rest], Result],
) -> Callable[Concatenate[First, Rest], Result]:
    """Wrap a definition so that tensors reach their device's version of it, where there is one.

    Args:
        definition: an op of `nv_kernels.reference`.

    Returns:
        The op: same signature, first argument by position.
    """

    @wraps(definition)
    def op(first: First, /, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        result: Result = _version(definition, first.device.type)(first, *rest, **named)
        return result

    return op


@cache
def _version(definition: Callable[..., Any], device: str) -> Callable[..., Any]:
    name = definition.__name__
    if device == "cuda" and name in TRITON_OPS:
        module = f"nv_kernels.triton.{TRITON_OPS[name]}"
    elif device == "cpu" and name in CPU_OPS:
        module = "nv_kernels.cpu.ops"
    else:
        return definition
    implementation: Callable[..., Any] = vars(importlib.import_module(module))[name]
    return implementation


rms_norm = dispatched(reference.rms_norm)
add_rms_norm = dispatched(reference.add_rms_norm)
all_reduce_add_rms_norm = dispatched(reference.all_reduce_add_rms_norm)
silu_and_mul = dispatched(reference.silu_and_mul)
pack_weight = dispatched(reference.pack_weight)
pack_head = dispatched(reference.pack_head)
linear = dispatched(reference.linear)
logits = dispatched(reference.logits)
batch_invariant_linear = dispatched(reference.batch_invariant_linear)
batch_invariant_logits = dispatched(reference.batch_invariant_logits)
batch_invariant_silu_and_mul = dispatched(reference.batch_invariant_silu_and_mul)
batch_invariant_partials = dispatched(reference.batch_invariant_partials)
embedding = dispatched(reference.embedding)
apply_rope = dispatched(reference.apply_rope)
store_kv = dispatched(reference.store_kv)
qk_norm_rope_store = dispatched(reference.qk_norm_rope_store)
copy_blocks = dispatched(reference.copy_blocks)
sample = dispatched(reference.sample)
shape_logits = dispatched(reference.shape_logits)
top_logprobs = dispatched(reference.top_logprobs)
decode_rows = dispatched(reference.decode_rows)
keep_tokens = dispatched(reference.keep_tokens)
prompt_rows = dispatched(reference.prompt_rows)


def compile_ahead() -> AbstractContextManager[None]:
    """Compile, in parallel and without launching, the Triton kernels that a block would launch.

    For the start of a process on a card: results inside the block are undefined, and what a
    kernel would have written must not be used as an index by torch.
    """
    module = importlib.import_module("nv_kernels.triton.ahead")
    block: AbstractContextManager[None] = module.compile_ahead()
    return block
