"""The head of a GGUF file: metadata, and where each tensor lies.

Owns: the parsing of versions 2 and 3, little endian (github.com/ggml-org/ggml, docs/gguf.md). The
gguf library's own reader makes several arrays of each token, seconds for a large vocabulary.
Never: reads a tensor.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

SCALARS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32
Value: TypeAlias = Any  # number, bool, string, or a list of them; the key says which


@dataclass(frozen=True)
class TensorInfo:
    """Shape as torch counts it, ggml's type number, and the first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """What a file says before its tensors."""

    file: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """`general.architecture`: the prefix of the sizes' keys."""
        return str(self.metadata.get("general.architecture", ""))


def read_header(file: Path) -> Header:
    """Parse the head of a GGUF file.

    Raises:
        ValueError: not GGUF, a version or byte order that is not read, or a file that ends early.
    """
    with file.open("rb") as stream:
        magic, version = stream.read(4), stream.read(4)
        if magic != b"GGUF" or version not in {b"\2\0\0\0", b"\3\0\0\0"}:
            raise ValueError(f"{file} is not a little-endian GGUF file of version 2 or 3")
        try:
            return parse(file, stream)
        except (struct.error, KeyError, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise ValueError(f"{file} is corrupt or truncated in its header ({error!r})") from error


def parse(file: Path, stream: BinaryIO) -> Header:
    """The header behind magic and version."""
    num_tensors, num_keys = read_scalar(stream, "Q"), read_scalar(stream, "Q")
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = read_string(stream)
        metadata[key] = read_value(stream, read_scalar(stream, "I"))
    relative: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        name = read_string(stream)
        dims = [read_scalar(stream, "Q") for _ in range(read_scalar(stream, "I"))]
        kind, offset = read_scalar(stream, "I"), read_scalar(stream, "Q")
        relative[name] = TensorInfo(tuple(reversed(dims)), kind, offset)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(
            f"{file}: general.alignment is {alignment!r}, but must be a positive integer; "
            "download or convert the file again"
        )
    start = -(-stream.tell() // alignment) * alignment
    tensors = {
        name: TensorInfo(info.shape, info.kind, start + info.offset)
        for name, info in relative.items()
    }
    return Header(file, metadata, tensors)


def read_scalar(stream: BinaryIO, code: str) -> Value:
    """One number, by struct's letter."""
    return struct.unpack("<" + code, stream.read(struct.calcsize("<" + code)))[0]


def read_string(stream: BinaryIO) -> str:
    """A length and that many bytes of UTF-8."""
    length = read_scalar(stream, "Q")
    data = stream.read(length)
    if len(data) < length:
        raise struct.error(f"a string of {length} bytes ends early")
    return data.decode("utf-8")


def read_value(stream: BinaryIO, kind: int) -> Value:
    """A metadata value: number, bool, string, or a list of them."""
    if kind == STRING:
        return read_string(stream)
    if kind != ARRAY:
        return read_scalar(stream, SCALARS[kind])
    item, count = read_scalar(stream, "I"), read_scalar(stream, "Q")
    if item in {STRING, ARRAY}:
        return [read_value(stream, item) for _ in range(count)]
    code = f"<{count}{SCALARS[item]}"
    return list(struct.unpack(code, stream.read(struct.calcsize(code))))
