"""LoRARequest: one adapter of low rank, as a user names it.

Owns the record and the checks that need neither files nor a model.
"""

from dataclasses import dataclass
from pathlib import Path

from nv_engine.names import ForeignNames
from nv_engine.values import boolean, integer, shown

MAX_ID = 2**31 - 1
"""Largest id of an adapter."""


VLLM_NAMES = ForeignNames(
    no_difference=frozenset({"long_lora_max_len"}),
    unbuilt={"tensorizer_config_dict": ()},
    renamed={
        "lora_local_path": "lora_path",
        "path": "lora_path",
        "name": "lora_name",
        "id": "lora_int_id",
        "lora_id": "lora_int_id",
        "adapter_id": "lora_int_id",
    },
    instead={"tensorizer_config_dict": "save the adapter with peft, and pass its folder"},
)


@dataclass(frozen=True, init=False)
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
        TypeError: an argument is missing, or is not one of these.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False

    @VLLM_NAMES.arguments_of
    def __init__(
        self,
        lora_name: str,
        lora_int_id: int,
        lora_path: str | Path,
        base_model_name: str | None = None,
        load_inplace: bool = False,  # vLLM's order
    ) -> None:
        path = str(lora_path) if isinstance(lora_path, Path) else lora_path
        own = None if base_model_name is None else text("base_model_name", base_model_name)
        self.__dict__.update(  # the fields are frozen
            lora_name=text("lora_name", lora_name),
            lora_int_id=integer("lora_int_id", lora_int_id, 1, MAX_ID),
            lora_path=text("lora_path", path),
            base_model_name=own,
            load_inplace=boolean("load_inplace", load_inplace),
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


def text(name: str, value: object) -> str:
    """A text that is not empty, as a plain str that any process can read.

    Raises:
        ValueError: it is something else.
    """
    try:
        if isinstance(value, str) and value.strip() and value.encode() and "\0" not in value:
            return str(value)
    except UnicodeEncodeError:
        pass
    raise ValueError(
        f"{name} is {shown(value)}: it must be a text that is not empty, in valid Unicode and "
        "without null characters"
    )
