"""The folder for files that are made once: compiled kernels, folders of GGUF files.

Owns the choice among `$XDG_CACHE_HOME/nv`, `~/.cache/nv` and a private folder among the temporary
files.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

USER = os.getuid() if hasattr(os, "getuid") else None


def cache_path(kind: str, name: str) -> Path:
    """Return the path of a cached file, which may not exist yet.

    Args:
        kind: a subfolder, such as "kernels".
        name: name of a file or folder in it.

    Returns:
        The path in the first folder that has it, else in the first folder that can be written,
        which is created.

    Raises:
        OSError: no folder has it and none can be written.
    """
    roots = [*_user_roots(), *_private_root()]
    for root in roots:
        if os.path.lexists(root / kind / name):
            return root / kind / name
    for root in roots:
        if _can_write(root, kind):
            return root / kind / name
    tried = ", ".join(map(str, roots)) or "no folder"
    raise OSError(
        f"nv cannot write its cache ({tried}): set XDG_CACHE_HOME to a folder that can be written"
    )


def _user_roots() -> list[Path]:
    """The folders that the user chose, the preferred one first."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification demands that a relative path is ignored.
    roots = [Path(base) / "nv"] if Path(base).is_absolute() else []
    with contextlib.suppress(RuntimeError):  # no HOME, and no entry in the user database
        roots.append(Path.home() / ".cache" / "nv")
    return roots


def _private_root() -> list[Path]:
    """The folder among the temporary files, unless another user can write it."""
    with contextlib.suppress(OSError):  # the machine has no folder for temporary files
        root = Path(tempfile.gettempdir()) / f"nv-{'user' if USER is None else USER}"
        if not os.path.lexists(root) or _is_private(root):
            return [root]
    return []


def _is_private(root: Path) -> bool:
    """Whether a path is a folder, not a link, that only this user can write."""
    status = root.lstat()
    is_ours = USER is None or (status.st_uid == USER and not status.st_mode & 0o022)
    return stat.S_ISDIR(status.st_mode) and is_ours


def _can_write(root: Path, kind: str) -> bool:
    """Create the folder if possible; return whether this process may write files there."""
    folder = root / kind
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
