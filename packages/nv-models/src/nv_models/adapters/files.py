"""AdapterFiles: one folder that peft wrote.

Owns the names of its tensors, the strict comparison with a model, and the digest of its bytes.
Opening reads the config and the header; values are read a matrix at a time.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from nv_models.adapters.config import (
    CONFIG,
    MERGE,
    SAVED_BY_PEFT,
    AdapterConfig,
    read_adapter_config,
)
from nv_models.adapters.targets import MAX_RANK, AdapterTargets
from nv_models.listing import first_few
from nv_models.missing import is_there, why_missing
from nv_models.pointer import POINTER, is_pointer

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
CHANGED = "has changed while it was read: load it with load_inplace=True"
PIECE = 2**20
"""Bytes that are read at once for the digest."""
MOST_PROBLEMS = 2
"""Tensors that do not fit, of which an error tells: often one reason has hundreds."""


class LowRank(NamedTuple):
    """One module's adapter.

    Attributes:
        module: its name in the base model.
        a: the tensor's name; [r, K], or of an embedding [r, V].
        b: the tensor's name; [N, r].
        rank: r.
        scale: factor of B A.
    """

    module: str
    a: str
    b: str
    rank: int
    scale: float


class Saved(NamedTuple):
    """A module that was trained whole: a classifier's own head.

    Attributes:
        module: its name in the base model.
        weight: the tensor's name; [N, K].
        bias: the tensor's name; [N], or None.
    """

    module: str
    weight: str
    bias: str | None


class _Tensor(NamedTuple):
    """A tensor's name, taken apart."""

    name: str
    module: str
    part: str


@dataclass(frozen=True)
class AdapterFiles:
    """A folder's config, and the names and shapes of its tensors.

    Attributes:
        folder: where they are.
        config: of adapter_config.json.
        shapes: of the tensors, by name.
        signature: sizes and times of both files: as long as they are equal, so are the bytes.
    """

    folder: Path
    config: AdapterConfig
    shapes: dict[str, tuple[int, ...]]
    signature: tuple[int, ...]

    @classmethod
    def open(cls, folder: Path) -> "AdapterFiles":
        """Read the config and the header.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: a file is corrupt, or asks for what is not computed.
        """
        config, file = read_adapter_config(folder), folder / WEIGHTS
        if not file.is_file():
            raise FileNotFoundError(_why_no_weights(folder))
        try:
            with safe_open(file, framework="pt") as opened:
                views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                dtypes = {name: view.get_dtype() for name, view in views.items()}
                shapes = {name: tuple(view.get_shape()) for name, view in views.items()}
        except (SafetensorError, OSError) as error:
            why = f"is corrupt or truncated ({error}): copy or save the adapter again"
            raise ValueError(f"{file} {POINTER if is_pointer(file) else why}") from error
        for name, dtype in dtypes.items():
            if dtype not in FLOATS:
                raise ValueError(
                    f"{file}: {name} is {dtype}: it must be {' or '.join(FLOATS)}; save the "
                    "adapter in floats"
                )
        return cls(folder, config, shapes, _signature(folder))

    @property
    def largest_rank(self) -> int:
        """The largest rank of its matrices, by their shapes; at least 1."""
        parts = [(_taken_apart(name), shape) for name, shape in self.shapes.items()]
        return max([1, *(shape[0] for part, shape in parts if part and part.part == "A")])

    def matrices(self, targets: AdapterTargets, max_rank: int) -> list[LowRank]:
        """The adapter of each module, every tensor used or known.

        Args:
            targets: of the model.
            max_rank: the largest rank that there is room for.

        Raises:
            ValueError: a tensor that is not known or has another shape than the model wants, or a
                rank above `max_rank`; of several problems the first few are named.
        """
        pairs: dict[str, dict[str, str]] = {}
        problems: list[str] = []
        for name in self.shapes:
            tensor = _taken_apart(name)
            if tensor is None:
                problems.append(_why_not_known(name))
            elif tensor.part in {"weight", "bias"}:
                problems += self._misfit_of_saved(tensor, targets)
            elif tensor.part:
                pairs.setdefault(tensor.module, {})[tensor.part] = name
        found = [self._pair(m, pair, targets, problems) for m, pair in pairs.items()]
        if not problems and not any(map(_is_read, self.shapes)):
            problems.append("it has no matrix of LoRA: save the adapter again")
        problems += _above(max_rank, [each for each in found if each is not None])
        if problems:
            raise ValueError(
                f"{self.folder / WEIGHTS}: {'; '.join(first_few(problems, MOST_PROBLEMS))}"
            )
        return [each for each in found if each is not None]

    def saved(self) -> list[Saved]:
        """The modules that were trained whole; `matrices` has compared them with the model."""
        parts = [tensor for tensor in map(_taken_apart, self.shapes) if tensor is not None]
        biases = {tensor.module: tensor.name for tensor in parts if tensor.part == "bias"}
        return [
            Saved(each.module, each.name, biases.get(each.module))
            for each in parts
            if each.part == "weight"
        ]

    def _misfit_of_saved(self, tensor: _Tensor, targets: AdapterTargets) -> list[str]:
        """Why a tensor of a whole module cannot be taken."""
        wanted = targets.saved.get(tensor.module)
        if wanted is None:
            return [f"{tensor.name} is a whole module: {targets.why_not(tensor.module)}"]
        shape = wanted if tensor.part == "weight" else wanted[:1]
        if self.shapes[tensor.name] != shape:
            found = list(self.shapes[tensor.name])
            return [f"{tensor.name} has the shape {found}: it must be {list(shape)}"]
        return []

    def _pair(
        self,
        name: str,
        pair: dict[str, str],
        targets: AdapterTargets,
        problems: list[str],
    ) -> LowRank | None:
        """One module's adapter; None, with a problem more, if it does not fit."""
        module = targets.find(name)
        if module is None:
            problems.append(f"{name:.200} has an adapter, and {targets.why_not(name)}")
            return None
        if len(pair) == 1:
            problems.append(
                f"{name} has {next(iter(pair))} without the other matrix: save the adapter again"
            )
            return None
        rows, columns = targets.linear.get(module) or targets.embedding[module][::-1]
        rank = self.config.rank_of(name)
        wanted = {"A": (rank, columns), "B": (rows, rank)}
        for part, tensor in pair.items():
            if self.shapes[tensor] != wanted[part]:
                problems.append(
                    f"{tensor} has the shape {list(self.shapes[tensor])}: with this base model and "
                    f"r = {rank} it must be {list(wanted[part])}"
                )
                return None
        is_embedding = pair["A"].endswith("lora_embedding_A")
        if is_embedding != (module in targets.embedding):
            problems.append(
                f"{pair['A']} is of another kind of module than the base model's: was the adapter "
                "trained on another one?"
            )
            return None
        return LowRank(module, pair["A"], pair["B"], rank, self.config.scale_of(name))

    def is_unchanged(self) -> bool:
        """Whether the files still are those that were opened."""
        try:
            return _signature(self.folder) == self.signature
        except OSError:
            return False

    def digest(self) -> bytes:
        """16 bytes that name the adapter's bytes: its config's, then its weights'."""
        digest = hashlib.blake2b(digest_size=16)
        for name in (CONFIG, WEIGHTS):
            with (self.folder / name).open("rb") as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
        return digest.digest()

    def read(self) -> "AdapterReader":
        """The open file, for values; to be used in a `with` statement.

        Raises:
            ValueError: the file was cut off since the folder was opened.
        """
        return AdapterReader(self.folder / WEIGHTS)


class AdapterReader:
    """The values of an adapter's tensors.

    They are read, not mapped: a training that saves again may cut the file off at any time, and a
    page that is gone would end the process. The safetensors library maps a file, or takes all its
    bytes; a rank needs its slices.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        try:
            length = int.from_bytes(self._bytes(0, 8), "little")
            self._tensors: dict[str, Any] = json.loads(self._bytes(8, length))
        except ValueError as error:
            self._file.close()
            raise ValueError(f"{path} {CHANGED}") from error
        self._start = 8 + length

    def __enter__(self) -> "AdapterReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def slice(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """Some rows and columns of a matrix, in fp32 on the host; other rows are not read."""
        entry = self._tensors[name]
        first, last, _ = rows.indices(entry["shape"][0])
        width, dtype = math.prod(entry["shape"][1:]), FLOATS[entry["dtype"]]
        at = self._start + entry["data_offsets"][0] + first * width * dtype.itemsize
        data = self._bytes(at, (last - first) * width * dtype.itemsize)
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, device="cpu")
        values = flat.view(last - first, *entry["shape"][1:])
        return values[:, columns].float() if values.dim() > 1 else values.float()

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor, in fp32 on the host."""
        return self.slice(name, slice(None), slice(None))

    def _bytes(self, start: int, length: int) -> bytearray:
        self._file.seek(start)
        data = bytearray(self._file.read(length))
        if len(data) != length:
            raise ValueError(f"{self._path} {CHANGED}")
        return data


def _above(max_rank: int, found: Sequence[LowRank]) -> list[str]:
    """A sentence about the largest rank, if it is above `max_rank`; else an empty list."""
    largest = max(found, key=attrgetter("rank"), default=None)
    if largest is None or largest.rank <= max_rank:
        return []
    fix = f"load the model with max_lora_rank={largest.rank}"
    if largest.rank > MAX_RANK:
        fix = f"it can be {MAX_RANK} at most; {MERGE}"
    rank = f"the rank of {largest.module} is {largest.rank} and max_lora_rank is {max_rank}"
    return [f"{rank}: {fix}"]


def _is_read(name: str) -> bool:
    """Whether a tensor changes something."""
    tensor = _taken_apart(name)
    return tensor is not None and bool(tensor.part)


def _taken_apart(name: str) -> _Tensor | None:
    """A tensor's module and part; None: it is not known.

    A part is A or B, "weight" or "bias" of a module that was trained whole, or "" for a copy of the
    base's.
    """
    if not name.startswith(PREFIX):
        return None
    rest = name.removeprefix(PREFIX)
    for ending, part in (
        (".lora_A.weight", "A"),
        (".lora_B.weight", "B"),
        (".lora_embedding_A", "A"),
        (".lora_embedding_B", "B"),
        (".base_layer.weight", ""),
    ):
        if rest.endswith(ending):
            return _Tensor(name, rest.removesuffix(ending), part)
    for part in ("weight", "bias"):
        if rest == f"score.{part}":
            return _Tensor(name, "score", part)
    return None


def _signature(folder: Path) -> tuple[int, ...]:
    """Size, time and place of both files."""
    stats = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    return tuple(n for each in stats for n in (each.st_size, each.st_mtime_ns, each.st_ino))


def _why_no_weights(folder: Path) -> str:
    if is_there(file := folder / WEIGHTS):
        return f"{file} {why_missing(file, '')}: {SAVED_BY_PEFT}"
    if (folder / "adapter_model.bin").is_file():
        return (
            f"{folder} has adapter_model.bin and no {WEIGHTS}: load it with peft and save it again "
            "with save_pretrained (safe_serialization=True)"
        )
    return f"{folder} has no {WEIGHTS}: {SAVED_BY_PEFT}"


def _why_not_known(name: str) -> str:
    """The problem of a tensor whose name peft's `save_pretrained` does not write for LoRA."""
    shown = f"{name:.200}"
    if not name.startswith(PREFIX):
        return (
            f"{shown} does not begin with {PREFIX}: save the adapter with peft's save_pretrained, "
            "not its tensors alone"
        )
    if re.search(r"\.lora_(embedding_)?[AB]\.", name):  # with an adapter's name in it
        return f"{shown} is the name in a model: save the adapter with peft's save_pretrained"
    return f"{shown} is not a tensor of LoRA: {MERGE}"
