"""The strict loader: every shard of the model is filled from the checkpoint, or none is.

Owns the comparison of a model's shards with a checkpoint's tensors, the order in which modules are
made, and the copying. Never opens a file. Never guesses.
"""

import math
import warnings
from collections.abc import Callable

import torch
from torch import nn

from nv_models.causal import CausalLM
from nv_models.checkpoint import Checkpoint
from nv_models.fields import naming
from nv_models.layers.embedding import TiedEmbedding, Vocabulary
from nv_models.layers.experts import ExpertMLPs
from nv_models.layers.linear import Linear
from nv_models.listing import first_few
from nv_models.quantization.experts import LoadedExperts
from nv_models.quantization.form import DUMMY_STD, FLOATS
from nv_models.quantization.matrix import LoadedMatrix
from nv_models.shard import Allocated, Finished, Shard, Sharded
from nv_models.zeros import AGAIN, Zeros, refuse_zeros, zeros_of

MOST_PROBLEMS = 20
"""Of a checkpoint that does not fit, so many problems are named and the others counted."""
HEAD = "lm_head.weight"
COMPARED_ROWS = 64
"""Of two tables that should be one: enough, as tables that were trained apart differ everywhere.
"""
KNOWN_EXTRAS = ("rotary_emb.inv_freq", HEAD, "decoder.version")
"""Old files keep the rotary frequencies or a number of their format, and tied models, where no head
is wanted, a copy of the embedding as head."""


def allocate(model: nn.Module) -> None:
    """Make every large tensor, without values."""
    for name, module in model.named_modules():
        if isinstance(module, Allocated):
            module.allocate(name)


def list_shards(model: nn.Module) -> list[Shard]:
    """Where the values of each tensor come from, over all layers; they must be allocated."""
    shards: list[Shard] = []
    for name, module in model.named_modules():
        shards.extend(shards_of(name, module))
    return shards


def shards_of(name: str, module: nn.Module) -> list[Shard]:
    """Where the values of a module's own tensors come from."""
    return list(module.shards(name)) if isinstance(module, Sharded) else []


def refuse_misfit(shards: list[Shard], checkpoint: Checkpoint) -> None:
    """Check that a checkpoint holds what the shards name, and nothing else.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is corrupt, or a tensor missing, unexpected or of the wrong shape.
            Either message names the first MOST_PROBLEMS things that are wrong and counts the
            others.
    """
    problems = [*checkpoint.broken, *mismatches(shards, checkpoint)]
    if problems:
        lines = "\n  ".join(first_few(problems, MOST_PROBLEMS))
        message = f"the checkpoint {checkpoint.place} cannot be loaded:\n  {lines}\n{AGAIN}"
        raise FileNotFoundError(message) if checkpoint.incomplete else ValueError(message)


def make_modules(model: nn.Module, fill: Callable[[str, nn.Module], None]) -> None:
    """Make the tensors of one module after the other, fill and finish them.

    Memory at its peak holds the finished model and one module's tensors as they are loaded.
    """
    for name, module in model.named_modules():
        if isinstance(module, Allocated):
            module.allocate(name)
        with torch.inference_mode():
            fill(name, module)
        if isinstance(module, Finished):
            module.finish()


def load_weights(model: CausalLM, outline: CausalLM, checkpoint: Checkpoint, rank: int) -> None:
    """Make the model's tensors and fill them from the files, a slice of a tensor at a time.

    Args:
        model: without its large tensors.
        outline: the same model with all tensors on meta, by which the files are checked.
        checkpoint: the files.
        rank: rank 0 looks for zeros.

    Raises:
        FileNotFoundError: as `refuse_misfit`; no tensor was made.
        ValueError: as `refuse_misfit`; or the embedding, the head or the last norm is all zeros.

    Warns:
        UserWarning: the files hold another head than the embedding, which the model ties, or
            other matrices that are zeros, whole or in part.
    """
    refuse_misfit(list_shards(outline), checkpoint)
    has_offset = bool(model.config.norm_kind.offset)
    zeros: list[Zeros] = []

    def fill(name: str, module: nn.Module) -> None:
        shards = [shard for shard in shards_of(name, module) if shard.target.numel()]
        for shard in (shard for shard in shards if not shard.is_filled):
            checkpoint.copy(shard.source, shard.dim, shard.start, shard.target)
        if rank == 0:
            zeros.extend(zeros_of(shards, has_offset=has_offset))

    with naming(checkpoint.place):
        make_modules(model, fill)
    if rank == 0:
        refuse_zeros(zeros, checkpoint)
        warn_of_another_head(model, checkpoint)


def mismatches(shards: list[Shard], checkpoint: Checkpoint) -> list[str]:
    """One sentence for each tensor that is missing, unexpected, or of a wrong shape or dtype.

    Beside a file that cannot be read nothing is called missing: it may be in there.
    """
    wanted = {shard.source: shard for shard in shards}
    found, named = checkpoint.shapes, checkpoint.name_in_file
    missing = [
        f"{named(name)} {list(shard.shape)} is missing"
        for name, shard in wanted.items()
        if name not in found and not checkpoint.broken
    ]
    unexpected = [
        f"{named(name)} {list(shape)} is unexpected"
        for name, shape in found.items()
        if name not in wanted and not name.endswith(KNOWN_EXTRAS)
    ]
    wrong = [
        f"{named(name)} has shape {list(found[name])}, expected {list(shard.shape)}"
        for name, shard in wanted.items()
        if name in found and found[name] != shard.shape
    ]
    odd = [
        f"{named(name)} is {_name(stored)}, expected "
        f"{'plain floats' if shard.target.dtype in FLOATS else _name(shard.target.dtype)}"
        for name, shard in wanted.items()
        if name in found
        and not shard.is_filled
        and (stored := checkpoint.stored(name)) is not None  # else `broken` names it
        and not _fits(stored, shard.target.dtype)
    ]
    return missing + unexpected + wrong + odd


def _fits(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a tensor may be loaded as another dtype: floats as floats, codes as they are."""
    return stored == wanted or {stored, wanted} <= FLOATS


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def warn_of_another_head(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Warn where the head is the embedding, and the files hold another head.

    Some rows of this rank are compared.

    Args:
        model: loaded.
        checkpoint: of which it was filled.
    """
    ends = [module for module in model.modules() if isinstance(module, TiedEmbedding)]
    if not ends or HEAD not in checkpoint.shapes or not len(ends[0].kept) or ends[0].blocks:
        return
    table, kept = ends[0].weight, ends[0].kept
    whole = (ends[0].vocab_size, table.shape[1])
    step = -(-len(kept) // COMPARED_ROWS)
    if checkpoint.shapes[HEAD] == whole and all(
        torch.equal(_row(checkpoint, kept[row], table), table[row])
        for row in range(0, len(kept), step)
    ):
        return
    warnings.warn(
        f"{checkpoint.place}: {checkpoint.name_in_file(HEAD)} is not the embedding, though "
        "tie_word_embeddings is true: the embedding is the head, as config.json says; pass "
        'hf_overrides={"tie_word_embeddings": False} to use the head of the files',
        stacklevel=2,
    )


def _row(checkpoint: Checkpoint, token: int, like: torch.Tensor) -> torch.Tensor:
    """A token's row [E] of the files' head."""
    row = like.new_empty(1, like.shape[1])
    checkpoint.copy(HEAD, 0, token, row)
    return row[0]


def fill_dummy(model: nn.Module, seed: int, device: torch.device) -> None:
    """Make the model's tensors of random weights that the seed fixes.

    Norms are 1, and everything else is normal with a small deviation, or random codes.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def fill(prefix: str, module: nn.Module) -> None:
        if isinstance(module, Linear | Vocabulary) and module.matrix is not None:
            module.matrix.fill_dummy(generator)
        if isinstance(module, ExpertMLPs):
            module.fill_dummy(generator)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, DUMMY_STD, generator=generator)

    make_modules(model, fill)


def count_bytes(model: nn.Module, *, on_card: bool = False) -> int:
    """Bytes of the finished weights of a model whose tensors are allocated, on meta too.

    Args:
        model: whose weights are counted.
        on_card: they are laid out for a card.
    """
    quantized = sum(
        loaded.card_bytes if on_card else loaded.num_bytes
        for loaded in map(quantized_part, model.modules())
        if loaded is not None
    )
    return quantized + sum(each.nbytes for each in model.parameters())


def quantized_part(module: nn.Module) -> LoadedMatrix | LoadedExperts | None:
    """A module's quantized matrices, whose tensors are not among its parameters."""
    if isinstance(module, Linear | Vocabulary):
        return module.matrix
    return module.loaded if isinstance(module, ExpertMLPs) else None


def bytes_per_value(model: nn.Module) -> float:
    """Bytes of the layers' matrices per value; tensors must be allocated, on meta too."""
    num_bytes = num_values = 0
    for module in model.modules():
        if isinstance(module, Linear):
            num_bytes += module.matrix.num_bytes if module.matrix else module.values.nbytes
            num_values += math.prod(module.shape)
        elif isinstance(module, ExpertMLPs):
            floats = (module.gate_up, module.down) if module.loaded is None else ()
            num_bytes += sum(each.nbytes for each in floats)
            num_values += sum(each.numel() for each in floats)
            if module.loaded is not None:
                num_bytes += module.loaded.num_bytes
                num_values += module.loaded.num_values
    return num_bytes / num_values
