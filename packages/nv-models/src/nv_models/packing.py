"""After loading: weights laid out as the device's matrix product reads them fastest.

Owns: which weights that is. Never: changes a value. Where a weight has two uses, as a tied
embedding has, the table stays beside its packed copy.
"""

import nv_kernels as nk
import torch
from torch import nn

from nv_models.layers.embedding import Vocabulary
from nv_models.layers.linear import ColumnLinear, RowLinear


def pack_weights(model: nn.Module, head: Vocabulary, tied: bool) -> None:
    """Pack every matrix of a loaded model; one at a time, so that no second model is in memory."""
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            replace_weight(module, nk.pack_weight(module.weight))
    head.head_weight = nk.pack_head(head.weight)
    if not tied:
        replace_weight(head, head.head_weight)
        head.head_weight = head.weight


def replace_weight(module: nn.Module, packed: torch.Tensor) -> None:
    """Let go of the parameter `weight` for a packed one; what oneDNN packs is no nn.Parameter."""
    if packed is not module.weight:
        del module.weight
        module.weight = packed if packed.is_mkldnn else nn.Parameter(packed, requires_grad=False)
