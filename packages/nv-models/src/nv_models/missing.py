"""A path that is not there, that is not a file, or that cannot be: the words for it.

Never opens one.
"""

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


def is_there(file: Path) -> bool:
    """Whether a folder has a file, as a dead link or a folder too: its reader then names that."""
    return file.exists() or file.is_symlink()


def path_of(name: str | Path, what: str) -> Path:
    """A name as a path, whether or not something is there.

    Args:
        name: a user's.
        what: the name's own name in an error.

    Raises:
        ValueError: the system takes no such path: it is too long, has a character that no path has,
            or leads through a folder that this user may not read or the home of an unknown user.
    """
    try:
        str(name).encode()
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{what} is {str(name)!r:.200}, which cannot be a path ({reason}): give another"
        ) from error
    return path
