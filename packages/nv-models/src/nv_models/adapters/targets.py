"""The modules of a model that may have an adapter, by name, with their sizes.

Owns plain values alone: they travel to where no model is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_RANK = 512
"""The largest rank that a pool of adapters can have room for."""


@dataclass(frozen=True)
class AdapterTargets:
    """The modules of one model; frozen.

    Attributes:
        linear: (N, K) of each matrix, over all ranks, by its name in the checkpoint; the head's
            too.
        embedding: (V, E) by name: one module, or none.
        saved: (N, K) by name of modules that an adapter may replace: a classifier's head.
        refused: beginnings of names that are known and have no adapter, and why.
    """

    linear: Mapping[str, tuple[int, int]]
    embedding: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    saved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> str | None:
        """The module that a file names, which may leave "model." out or have it in front."""
        for each in (name, f"model.{name}", name.removeprefix("model.")):
            if each in self.linear or each in self.embedding:
                return each
        return None

    def why_not(self, name: str) -> str:
        """Why a module has no adapter here."""
        for beginning, why in self.refused.items():
            if name.startswith(beginning) or f"model.{name}".startswith(beginning):
                return why
        return "the base model has no such module: was the adapter trained on another one?"
