"""The fields of config.json that describe a mixture of experts.

Owns both names of the number of experts, and the errors. Never reads a file.
"""

from nv_models.architectures.row import Values
from nv_models.config import ExpertNames, Mixture
from nv_models.fields import size

COUNTS = ("num_experts", "num_local_experts")
"""Names of the number of experts: from version 5 on transformers writes the second."""


def mixture(
    values: Values,
    names: ExpertNames,
    *,
    num_experts: int,
    top_k: int,
    is_normalised: bool,
    width: int | None = None,
) -> Mixture:
    """Read the experts of a layer.

    Args:
        values: the fields of config.json.
        names: of the experts in the checkpoint.
        num_experts: where config.json names none.
        top_k: experts per token where config.json names none.
        is_normalised: the weights of a token's experts sum to 1.
        width: where config.json names none; None: it must.

    Raises:
        ValueError: two different numbers of experts, or more experts per token than there are.
    """
    counts = [size(values, name) for name in COUNTS if values.get(name) is not None]
    if len({*counts}) > 1:
        raise ValueError(
            f"num_experts is {counts[0]} and num_local_experts is {counts[1]}: they must be equal, "
            "or one of them null"
        )
    count, top_k = (counts or [num_experts])[0], size(values, "num_experts_per_tok", top_k)
    if top_k > count:
        raise ValueError(
            f"num_experts_per_tok is {top_k}: it must be at most the number of experts, {count}"
        )
    return Mixture(size(values, names.width, width), count, top_k, is_normalised, names)
