"""JoinedCheckpoint: the tensors of a model, wherever its files keep them.

Owns two things that files may do: leave out the `model.` of all names, as the class without a head
writes them, and keep the Dense layers of a pooling model in folders of their own. Never opens a
file.
"""

from collections.abc import Mapping

import torch

from nv_models.checkpoint import Checkpoint

BODY = "model."
HEAD = "lm_head."
SCORE = "score."
HEADS = (HEAD, SCORE)


class JoinedCheckpoint:
    """One checkpoint of several.

    Args:
        body: the model's own files.
        parts: those of the layers after it, by the name that goes in front of their tensors'.
        unused: beginnings of names of the body's that are left out.
    """

    def __init__(
        self, body: Checkpoint, parts: Mapping[str, Checkpoint], unused: tuple[str, ...] = ()
    ) -> None:
        self.place = body.place
        every = [body, *parts.values()]
        self.broken = [sentence for each in every for sentence in each.broken]
        self.incomplete = any(each.incomplete for each in every)
        is_bare = not any(name.startswith(BODY) for name in body.shapes)
        self._found: dict[str, tuple[Checkpoint, str]] = {}
        for name in body.shapes:
            if name.startswith(unused):
                continue
            full = f"{BODY}{name}" if is_bare and not name.startswith(HEADS) else name
            self._found[full] = body, name
        for prefix, part in parts.items():
            self._found |= {f"{prefix}.{name}": (part, name) for name in part.shapes}
        self.shapes = {full: part.shapes[name] for full, (part, name) in self._found.items()}
        self._dtype = body.dtype

    def name_in_file(self, name: str) -> str:
        """The name that the part's own file has."""
        if name not in self._found:
            return name
        part, own = self._found[name]
        return part.name_in_file(own)

    def dtype(self) -> torch.dtype:
        """The body's."""
        return self._dtype()

    def stored(self, name: str) -> torch.dtype | None:
        """The dtype in the part's own file."""
        part, own = self._found[name]
        return part.stored(own)

    def copy(self, name: str, dim: int, start: int, target: torch.Tensor) -> None:
        """Fill `target` with a slice of `name`."""
        part, own = self._found[name]
        part.copy(own, dim, start, target)
