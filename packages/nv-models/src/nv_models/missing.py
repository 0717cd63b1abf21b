"""A path that is not there, or that is not a file: the words for it. Never opens one."""

from pathlib import Path


def why_missing(file: Path, otherwise: str) -> str:
    """Return the reason why `file` is not a file: a folder, a pipe, a dead link, or `otherwise`."""
    if file.is_dir():
        return "is a folder, not a file"
    if file.exists():  # a reader of a pipe would wait for a writer
        return "is a pipe or a device, not a file"
    if file.is_symlink():
        return f"links to {file.readlink()}, which is gone (a pruned hub cache?)"
    return otherwise
