"""Git LFS pointers: small texts that stand where `git lfs pull` would put a file.

Owns the test for one, and the error. Never reads a file past its first bytes.
"""

from pathlib import Path

MARK = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(file: Path) -> None:
    """Raise ValueError where a file is a Git LFS pointer."""
    if is_pointer(file):
        raise ValueError(f"{file} {POINTER}")


POINTER = (
    "is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository, or download "
    "the file"
)


def is_pointer(file: Path) -> bool:
    """Whether a file is the text that Git LFS leaves in its place."""
    with file.open("rb") as stream:
        return stream.read(len(MARK)) == MARK
