"""The launch of the Hopper chunk kernel: tensor descriptors of the cache.

Owns how a cache is described to the bulk copy engine. Imports Gluon: only for a Hopper card.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nv_kernels.attention.triton.hopper import prefill_hopper_kernel
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.descriptors import describe

if TYPE_CHECKING:
    import torch

    from nv_kernels.attention.triton.settings import PrefillSettings


def launch(
    programs: int,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rest: tuple[Any, ...],
    chosen: PrefillSettings,
) -> None:
    """Launch the kernel.

    Args:
        programs: at most one a multiprocessor.
        qkv: queries [T, Hq, D], and keys and values of the cache [blocks, page, Hkv, D].
        rest: the kernel's arguments from block_tables_ptr to v_scale.
        chosen: the settings.
    """
    q, k, v = qkv
    box = [1, 1, chosen.block_n, q.shape[2]]
    # [blocks, Hkv, page, D]: a box is a run of one head's tokens, in either order of memory.
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    prefill_hopper_kernel[(programs,)](
        q,
        describe(keys, box),
        describe(values, box),
        *rest,
        NUM_KV_HEADS=k.shape[2],
        GROUP=q.shape[1] // k.shape[2],
        HEAD_DIM=q.shape[2],
        PAGE=k.shape[1],
        BLOCK_N=chosen.block_n,
        STAGES=chosen.stages,
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        num_warps=chosen.warps,
        **dependent_launch(q),
    )
