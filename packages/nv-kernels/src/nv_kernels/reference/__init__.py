"""Every op in plain torch: the definition that fast versions are tested against, and the CPU path.

Owns the meaning of each op, rounding points included. Never looks at the device.
"""

from nv_kernels.reference.activation import batch_invariant_silu_and_mul, silu_and_mul
from nv_kernels.reference.all_reduce import all_reduce_add_rms_norm
from nv_kernels.reference.attention import attention
from nv_kernels.reference.controls import shape_logits
from nv_kernels.reference.kv import copy_blocks, store_kv
from nv_kernels.reference.linear import (
    batch_invariant_linear,
    batch_invariant_partials,
    embedding,
    linear,
    pack_weight,
)
from nv_kernels.reference.logits import batch_invariant_logits, logits, pack_head
from nv_kernels.reference.norm import add_rms_norm, rms_norm
from nv_kernels.reference.rope import apply_rope, qk_norm_rope_store
from nv_kernels.reference.rows import decode_rows, keep_tokens, prompt_rows
from nv_kernels.reference.sampling import sample
from nv_kernels.reference.top_logprobs import top_logprobs

__all__ = [
    "add_rms_norm",
    "all_reduce_add_rms_norm",
    "apply_rope",
    "attention",
    "batch_invariant_linear",
    "batch_invariant_logits",
    "batch_invariant_partials",
    "batch_invariant_silu_and_mul",
    "copy_blocks",
    "decode_rows",
    "embedding",
    "keep_tokens",
    "linear",
    "logits",
    "pack_head",
    "pack_weight",
    "prompt_rows",
    "qk_norm_rope_store",
    "rms_norm",
    "sample",
    "shape_logits",
    "silu_and_mul",
    "store_kv",
    "top_logprobs",
]
