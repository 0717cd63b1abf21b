"""From a user's name of an adapter to a folder on this machine."""

from pathlib import Path

from nv_models.adapters.config import CONFIG, MERGE
from nv_models.adapters.files import WEIGHTS, AdapterFiles
from nv_models.adapters.targets import MAX_RANK
from nv_models.locate import HUB_NAME
from nv_models.missing import path_of


def resolve_adapter(name: str) -> Path:
    """Find an adapter's folder, or download it.

    Args:
        name: a folder, or a hub name such as `org/adapter`. What exists on disk wins.

    Raises:
        FileNotFoundError: a path that is not there, or a hub name that is not in the cache while
            offline.
        ValueError: a path that cannot be, or an unknown repository.
    """
    path = path_of(name, "lora_path")
    if path.is_dir():
        return path
    if path.exists() or not HUB_NAME.fullmatch(name):
        raise FileNotFoundError(
            f"{name} is not a folder: give the one that peft's save_pretrained wrote, or a hub name"
        )
    from nv_models.hub import download  # noqa: PLC0415  # it takes a while to import

    return download(name, None, [CONFIG, WEIGHTS])


def largest_rank(name: str) -> int:
    """The largest rank of an adapter, whose files are checked as far as that needs no model.

    Args:
        name: as of `resolve_adapter`.

    Raises:
        FileNotFoundError, ValueError: as `resolve_adapter` and `AdapterFiles.open`, or the rank is
            above MAX_RANK.
    """
    rank = AdapterFiles.open(resolve_adapter(name)).largest_rank
    if rank > MAX_RANK:
        raise ValueError(
            f"the largest rank of {name} is {rank}: it can be at most {MAX_RANK}; {MERGE}"
        )
    return rank
