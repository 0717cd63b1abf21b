"""A file that is not there: the words for it. Never opens one."""

from pathlib import Path


def why_missing(file: Path, otherwise: str) -> str:
    """Return the reason why `file` is not a file: a folder, a link to nothing, or `otherwise`."""
    if file.is_dir():
        return "is a folder, not a file"
    if file.is_symlink():
        return f"links to {file.readlink()}, which is gone (a pruned hub cache?)"
    return otherwise
