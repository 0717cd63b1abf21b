"""How a kernel is launched: programmatic dependent launch where the card has it.

Owns the rule of the chain. A kernel whose PDL flag is set waits (`gdc_wait`, in every program)
before it reads what the kernel ahead wrote or writes anything: so the completion of a kernel
implies that of all before it, and a buffer may be reused by the next one. Most let their successor
start early. Before the wait a kernel reads what is older than the kernel ahead: weights, tables,
and in decode attention the plan and all keys but the newest, whose writers hold their successor.
Never picks a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nv_kernels.launch.card import capability

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

DEPENDENT: Mapping[str, Any] = {"PDL": True, "launch_pdl": True}
INDEPENDENT: Mapping[str, Any] = {"PDL": False}


def dependent_launch(tensor: torch.Tensor) -> Mapping[str, Any]:
    """Give the launch options of a kernel that may start before its predecessor ends.

    Args:
        tensor: any argument of the kernel.

    Returns:
        Keyword arguments: the PDL constexpr, and launch_pdl on capability 9.0 or later.
    """
    return DEPENDENT if tensor.is_cuda and capability(tensor.device) >= 9 else INDEPENDENT
