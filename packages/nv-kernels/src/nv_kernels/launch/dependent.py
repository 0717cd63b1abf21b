"""Programmatic dependent launch (PDL), for cards that have it.

Every program of a kernel whose PDL flag is set waits (`gdc_wait`) before it reads the previous
kernel's results, and before it writes. So if a kernel has ended, all kernels before it have ended
too, and the next kernel may reuse a buffer. Most kernels let the next one start early. Before the
wait a kernel reads only data that is older than the previous kernel: weights, tables, and in decode
attention the plan and all keys except the newest. The kernels that write these do not let the next
one start early. With experts it is the choice, or the tokens before it: there the kernel between
waits before it lets the next one start, so what came before has ended.
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
    """Return the launch options of a kernel that may start before the previous kernel ends.

    Args:
        tensor: any argument of the kernel.

    Returns:
        Keyword arguments: the PDL constexpr, and launch_pdl on capability 9.0 or later.
    """
    return DEPENDENT if tensor.is_cuda and capability(tensor.device) >= 9 else INDEPENDENT
