"""Adapter: one version of an adapter's files, as the host knows it.

Owns what of it the scheduler reads. A thread of the library reads the files; what it finds it
assigns once, digest or failure.
"""

from typing import NamedTuple


class AdapterSource(NamedTuple):
    """Where a version's bytes are; it travels to the device's side."""

    key: int
    """Of this version: no other version of any adapter has it."""
    name: str
    folder: str
    signature: tuple[int, ...]
    """As long as it is the files' own, they have not changed."""


class Adapter:
    """One version of an adapter.

    Attributes:
        source: its files.
        digest: names their bytes; None: they are not read yet.
        failure: why it cannot be used; None: nothing is known against it.
    """

    __slots__ = ("digest", "failure", "source")

    def __init__(self, source: AdapterSource) -> None:
        self.source = source
        self.digest: bytes | None = None
        self.failure: str | None = None

    @property
    def key(self) -> int:
        """Of this version."""
        return self.source.key

    def salt(self, of_request: bytes) -> bytes:
        """The salt of its requests' blocks in the prefix cache: no other bytes give an equal one.

        A request's own salt is UTF-8, which never has the byte 0xff.
        """
        assert self.digest is not None, "its files are not read yet"
        return b"\xff" + self.digest + of_request
