"""The files that hold a folder's weights: those that an index names, or one, or all of a kind.

Owns the choice among them, and the sentences about those that are gone. Never opens a file of
weights.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from nv_models.missing import is_there, why_missing
from nv_models.pointer import POINTER, is_pointer


@dataclass(frozen=True)
class Naming:
    """How the files of one format are named.

    Args:
        index: of the file that names the shards.
        single: of the only file.
        pattern: of the files where there is neither.
        format: in a message.
    """

    index: str
    single: str
    pattern: str
    format: str


@dataclass
class WeightFiles:
    """The files of a folder.

    The index comes first, as in vLLM, unless none of its files is there and the single file is.
    Other files are other formats of the model, or adapters.

    Attributes:
        present: those that are there, in order.
        broken: a sentence for each that is not, and for an index that cannot be read.
        incomplete: True if one is not there.
    """

    folder: Path
    naming: Naming
    present: list[Path] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    incomplete: bool = False

    def __post_init__(self) -> None:
        for file in self._wanted():
            if file.is_file():
                self.present.append(file)
            else:
                self._note_gone(file)

    def _wanted(self) -> list[Path]:
        single, index = self.folder / self.naming.single, self.folder / self.naming.index
        has_single = os.path.lexists(single)
        if index.exists() or (is_there(index) and not has_single):
            indexed = self._indexed(index)
            if not has_single or any(map(os.path.lexists, indexed)):
                return indexed
        return [single] if has_single else sorted(self.folder.glob(self.naming.pattern))

    def _indexed(self, index: Path) -> list[Path]:
        """The files that an index names."""
        if not index.is_file():
            self.broken.append(f"{index} {why_missing(index, 'is missing')}")
            return []
        try:
            content = json.loads(index.read_text(encoding="utf-8-sig"))
            weight_map = content.get("weight_map") if isinstance(content, dict) else None
            names = weight_map.values() if isinstance(weight_map, dict) else (None,)
            if all(isinstance(name, str) for name in names):
                return [index.parent / name for name in sorted(set(names))]
            why = "it has no weight_map from the names of tensors to the names of files"
        except (ValueError, RecursionError) as error:
            why = str(error)
        about = POINTER if is_pointer(index) else f"is not a {self.naming.format} index: {why}"
        self.broken.append(f"{index} {about}")
        return []

    def _note_gone(self, file: Path) -> None:
        self.incomplete = True
        why = why_missing(file, f"is missing, though {self.naming.index} names it")
        self.broken.append(f"{file} {why}")
