"""After loading: weights laid out as the device's matrix product reads them fastest.

Owns: which weights that is. Never: changes a value. Where a weight has two uses, as a tied
embedding has, the table stays beside its packed copy.
"""

import nv_kernels as nk
from torch import nn

from nv_models.layers.embedding import Vocabulary
from nv_models.layers.linear import ColumnLinear, RowLinear


def pack_weights(model: nn.Module, head: Vocabulary) -> None:
    """Pack every matrix of a loaded model; one at a time, so that no second model is in memory."""
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            packed = nk.pack_weight(module.weight)
            if packed is not module.weight:  # and so no nn.Parameter
                del module.weight
                setattr(module, "weight", packed)  # noqa: B010  # typed as the parameter it was
    head.head_weight = nk.pack_weight(head.weight)
