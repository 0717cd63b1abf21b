"""Launches the decode kernel, on rotated queries or on the projection itself.

Owns the arguments of that launch. Never plans, never allocates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from nv_kernels.triton import settings
from nv_kernels.triton.decode_attention import decode_attention_kernel
from nv_kernels.triton.dependent import dependent_launch

if TYPE_CHECKING:
    from nv_kernels.attention.triton_plan import DecodePlan
    from nv_kernels.kv import KVCache
    from nv_kernels.metadata import AttentionMetadata, AttentionShape

LOG2_E = math.log2(math.e)
PAIR_SCALE = 256.0  # the 2**8 that the kernels' reading of e4m3 leaves out
EARLY_ROOM = 512  # query elements of a program beside which a tile of registers does not spill


@dataclass(frozen=True)
class Rotated:
    """Queries as `nv_kernels.qk_norm_rope_store` gives them; their keys are in the cache.

    Attributes:
        q: [T, Hq, D], D contiguous.
    """

    q: torch.Tensor

    def arguments(self, kv: KVCache) -> dict[str, Any]:
        """Give the kernel's arguments that depend on it."""
        del kv
        q = self.q
        return {
            "q_ptr": q,
            "q_weight_ptr": q,
            "k_weight_ptr": q,
            "cos_sin_ptr": q,
            "slots_ptr": q,
            "plane": 0,
            "eps": 0.0,
            "k_inverse_scale": 1.0,
            "v_inverse_scale": 1.0,
            "Q_TOKEN": q.stride(0),
            "Q_HEAD": q.stride(1),
            "FUSED": False,
            "NORM": False,
            "NUM_PARTIALS": 1,
            "EARLY": False,
        }


@dataclass(frozen=True)
class Projected:
    """A projection, and what makes queries and the new token's key and value of it.

    Attributes:
        qkv: [S, (Hq + 2 Hkv) D], or [P, S, (Hq + 2 Hkv) D] partials; the last dimension contiguous.
        q_weight: [D], or None: no norm.
        k_weight: [D], None where q_weight is.
        eps: of both norms.
        cos_sin: [max_position, D] fp32.
        slot_mapping: [S].
        early: a piece's first tile is loaded before the wait for the kernel ahead, if the
            registers have room.
    """

    qkv: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    cos_sin: torch.Tensor
    slot_mapping: torch.Tensor
    early: bool = True

    def arguments(self, kv: KVCache) -> dict[str, Any]:
        """Give the kernel's arguments that depend on it."""
        qkv, head_dim = self.qkv, kv.k.shape[3]
        split = qkv.dim() == 3
        group = qkv.shape[-1] // (head_dim * kv.k.shape[2]) - 2
        return {
            "q_ptr": qkv,
            "q_weight_ptr": qkv if self.q_weight is None else self.q_weight,
            "k_weight_ptr": qkv if self.k_weight is None else self.k_weight,
            "cos_sin_ptr": self.cos_sin,
            "slots_ptr": self.slot_mapping,
            "plane": qkv.stride(0) if split else 0,
            "eps": self.eps,
            "k_inverse_scale": 1.0 / kv.k_scale,
            "v_inverse_scale": 1.0 / kv.v_scale,
            "Q_TOKEN": qkv.stride(-2),
            "Q_HEAD": head_dim,
            "FUSED": True,
            "NORM": self.q_weight is not None,
            "NUM_PARTIALS": qkv.shape[0] if split else 1,
            "EARLY": self.early and group * head_dim <= EARLY_ROOM,
        }


def launch_decode(
    shape: AttentionShape,
    x: Rotated | Projected,
    kv: KVCache,
    metadata: AttentionMetadata,
    plan: DecodePlan,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend for the plan's decode rows.

    Args:
        shape: what the backend was built for.
        x: where the queries come from.
        kv: the layer's cache, k and v strided alike.
        metadata: the step's.
        plan: its decode rows'.
        scale: multiplies q.k; positive.
        out: [T, Hq, D], contiguous; the decode rows are written.
    """
    k, v, fp8 = loaded(kv)
    unit = PAIR_SCALE if fp8 else 1.0
    chosen = plan.settings
    options = launch_options(shape, chosen, fp8=fp8, fused=isinstance(x, Projected))
    decode_attention_kernel[(plan.num_pieces,)](
        k_ptr=k,
        v_ptr=v,
        block_tables_ptr=metadata.block_tables,
        out_ptr=out,
        partials_ptr=plan.partials,
        sums_ptr=plan.sums,
        counters_ptr=plan.counters,
        records_ptr=plan.records,
        table_stride=metadata.block_tables.stride(0),
        qk_scale=scale * LOG2_E * kv.k_scale * unit,
        v_scale=kv.v_scale * unit,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=shape.num_q_heads // shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        DIM=triton.next_power_of_2(shape.head_dim),
        PAGE=shape.block_size,
        TILE=chosen.tile,
        KV_BLOCK=k.stride(0),
        KV_TOKEN=k.stride(1),
        KV_HEAD=k.stride(2),
        FP8=fp8,
        STAGES=chosen.stages,
        MERGE=chosen.merge,
        PREFETCH=chosen.prefetch,
        **options,
        **x.arguments(kv),
        **dependent_launch(metadata.context_lens),
    )


def launch_options(
    shape: AttentionShape, chosen: settings.DecodeSettings, *, fp8: bool, fused: bool
) -> dict[str, int]:
    """Give warps, stages and the bound on registers.

    A fused program that norms many heads takes four warps. One of few heads would take up to 255
    registers, and fewer would fit on a multiprocessor than the plan counts on: within the bounds
    below it does not spill either.
    """
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    if not fused:
        return options
    group = shape.num_q_heads // shape.num_kv_heads
    if group > 4:
        options["num_warps"] = 4
    elif group <= 2 and shape.head_dim <= 128:
        if chosen.num_resident > 4 * settings.num_multiprocessors(shape.device):
            options["maxnreg"] = 200  # five programs of two warps
        elif fp8 and chosen.warps == 4:
            options["maxnreg"] = 128  # four of four
    return options


def loaded(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Give the cache as the kernels load it (fp8 as int16 pairs), and whether it is fp8."""
    if kv.k.dtype == torch.float8_e4m3fn:
        return kv.k.view(torch.int16), kv.v.view(torch.int16), True
    return kv.k, kv.v, False
