"""The launch of the Hopper chunk kernel: tensor descriptors of the cache.

Describes the cache to the bulk copy engine. Imports Gluon: import it only for a Hopper card.
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
        programs: number of programs, at most one per multiprocessor.
        qkv: queries [T, Hq, D], and keys and values of the cache [blocks, block_size, Hkv, D].
        rest: the kernel's arguments from block_tables_ptr to v_scale.
        chosen: the settings.
    """
    q, k, v = qkv
    box = [1, 1, chosen.block_n, q.shape[2]]
    # [blocks, Hkv, block_size, D]: a box holds consecutive tokens of one head, in either memory
    # order.
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    prefill_hopper_kernel[(programs,)](
        q,
        describe(keys, box),
        describe(values, box),
        *rest,
        NUM_KV_HEADS=k.shape[2],
        GROUP=q.shape[1] // k.shape[2],
        HEAD_DIM=q.shape[2],
        BLOCK_SIZE=k.shape[1],
        BLOCK_N=chosen.block_n,
        STAGES=chosen.stages,
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        num_warps=chosen.warps,
        **dependent_launch(q),
    )
