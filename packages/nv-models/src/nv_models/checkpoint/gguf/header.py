"""The head of a GGUF file: metadata, and where each tensor lies.

Owns the parsing of versions 2 and 3, little endian (github.com/ggml-org/ggml, docs/gguf.md), and
the joining of a model's parts. The gguf library's own reader makes several arrays for each token,
which takes seconds for a large vocabulary. Never reads a tensor.
"""

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from nv_models.checkpoint.gguf.parts import part_files
from nv_models.missing import why_missing
from nv_models.pointer import refuse_pointer

SCALARS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32
AGAIN = "download or convert the file again"
Value: TypeAlias = Any  # number, bool, string, or a list of them, by the key


@dataclass(frozen=True)
class TensorInfo:
    """Shape as torch counts it, ggml's type number, and the first byte in its file."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    file: Path


@dataclass(frozen=True)
class Header:
    """Everything before a file's tensors; of a model in parts, its first file and all tensors."""

    file: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """`general.architecture`: the prefix of the sizes' keys."""
        return str(self.metadata.get("general.architecture", ""))


def read_header(file: Path) -> Header:
    """Parse the head of a GGUF file, and of all parts of its model.

    Raises:
        FileNotFoundError: a part does not lie beside the others, or is a folder or a pipe.
        ValueError: not GGUF, a version or byte order that is not read, a file that ends early, or
            parts that do not belong together.
    """
    files = part_files(file)
    headers = [read_part(each) for each in files]
    tensors: dict[str, TensorInfo] = {}
    for number, header in enumerate(headers):
        check_part(header, number, len(files))
        if twice := tensors.keys() & header.tensors.keys():
            raise ValueError(f"{header.file}: {min(twice)} is also in another part; {AGAIN}")
        tensors |= header.tensors
    first = headers[0]
    wanted = first.metadata.get("split.tensors.count", len(tensors))
    if len(files) > 1 and wanted != len(tensors):
        raise ValueError(
            f"{first.file}: split.tensors.count is {wanted!r}, but the {len(files)} parts hold "
            f"{len(tensors)} tensors; {AGAIN}"
        )
    return Header(first.file, first.metadata, tensors)


def check_part(header: Header, number: int, count: int) -> None:
    """Raise ValueError where a file's metadata and its name disagree on which part it is."""
    for key, expected in (("split.count", count), ("split.no", number)):
        found = header.metadata.get(key, expected)
        if found != expected and not (key == "split.count" and count == 1 and found == 0):
            raise ValueError(
                f"{header.file}: {key} is {found!r}, and by the file's name it is {expected}: give "
                "the parts of a model their names again, such as model-00001-of-00002.gguf"
            )


def read_part(file: Path) -> Header:
    """Parse the head of one file.

    Raises:
        FileNotFoundError: it is a folder or a pipe.
        ValueError: not GGUF, a version or byte order that is not read, a name that comes twice, or
            a file that ends early.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} {why_missing(file, 'does not exist')}; {AGAIN}")
    refuse_pointer(file)
    with file.open("rb") as stream:
        magic, version = stream.read(4), stream.read(4)
        if magic != b"GGUF" or version not in {b"\2\0\0\0", b"\3\0\0\0"}:
            raise ValueError(f"{file} is not a little-endian GGUF file of version 2 or 3")
        try:
            return parse(file, stream)
        except (struct.error, KeyError, MemoryError, OverflowError) as error:
            why = str(error) or "it counts more than memory holds"
            if isinstance(error, KeyError):
                why = f"a value has the unknown type {error}"
            raise ValueError(f"{file} is corrupt or truncated in its header ({why})") from error


def parse(file: Path, stream: BinaryIO) -> Header:
    """The header that follows magic and version."""
    num_tensors, num_keys = read_scalar(stream, "Q"), read_scalar(stream, "Q")
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = read_string(stream)
        refuse_twice(file, f"the key {key:.200}", key in metadata)
        metadata[key] = read_value(stream, read_scalar(stream, "I"))
    relative: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        name = read_string(stream)
        refuse_twice(file, f"the tensor {name:.200}", name in relative)
        dims = [read_scalar(stream, "Q") for _ in range(read_scalar(stream, "I"))]
        kind, offset = read_scalar(stream, "I"), read_scalar(stream, "Q")
        relative[name] = TensorInfo(tuple(reversed(dims)), kind, offset, file)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(
            f"{file}: general.alignment is {alignment!r}: it must be a power of two; {AGAIN}"
        )
    start = -(-stream.tell() // alignment) * alignment
    tensors = {name: replace(info, offset=start + info.offset) for name, info in relative.items()}
    return Header(file, metadata, tensors)


def refuse_twice(file: Path, what: str, is_there: bool) -> None:
    """Raise ValueError for a second definition, as llama.cpp does: which is right is not known."""
    if is_there:
        raise ValueError(f"{file} has {what} twice; {AGAIN}")


def read_scalar(stream: BinaryIO, code: str) -> Value:
    """One number, by struct's letter."""
    return struct.unpack("<" + code, stream.read(struct.calcsize("<" + code)))[0]


def read_string(stream: BinaryIO) -> str:
    """A length and that many bytes of UTF-8.

    Bytes that are not UTF-8 become surrogates, which `Section` refuses where a text matters.
    """
    length = read_scalar(stream, "Q")
    data = stream.read(length)
    if len(data) < length:
        raise struct.error(f"a string of {length} bytes ends early")
    return data.decode("utf-8", errors="surrogateescape")


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
