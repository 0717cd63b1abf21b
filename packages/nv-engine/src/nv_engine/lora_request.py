"""LoRARequest: one adapter of low rank, as a user names it.

Owns the record and the checks that need neither files nor a model.
"""

from dataclasses import dataclass
from pathlib import Path

from nv_engine.values import integer, shown

MAX_ID = 2**31 - 1
"""Largest id of an adapter."""


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that a request is to be computed with; the names are vLLM's.

    Args:
        lora_name: in outputs and messages, and by which a server offers it.
        lora_int_id: two requests with one id have one adapter: from 1.
        lora_path: the folder that peft's `save_pretrained` wrote, or a hub name.
        base_model_name: accepted and unused: the tensors show whether the adapter fits.
        load_inplace: read the files again if they have changed, or another path is given: requests
            from now on have the new adapter, those before keep theirs.

    Raises:
        ValueError: a name or path that is not a text or empty, or an id out of range.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_int_id", integer("lora_int_id", self.lora_int_id, 1, MAX_ID))
        path: object = self.lora_path
        if isinstance(path, Path):
            object.__setattr__(self, "lora_path", str(path))
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} is {shown(value)}: it must be a text that is not empty")
        if not isinstance(self.load_inplace, bool):
            raise ValueError(
                f"load_inplace is {shown(self.load_inplace)}: it must be True or False"
            )

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The adapter's id."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """Where its files are."""
        return self.lora_path
