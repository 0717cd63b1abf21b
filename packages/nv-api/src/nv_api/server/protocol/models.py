"""The shapes of /v1/models."""

from typing import Any, Literal

from nv_api.server.protocol.fields import Given


class ModelCard(Given):
    """One name of the model, or one adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "nv"
    root: str
    """The model as the server was started with it; of an adapter, where its files are."""
    parent: str | None = None
    """Of an adapter: its base model's name."""
    max_model_len: int
    """Most tokens of prompt and completion."""
    permission: tuple[Any, ...] = ()


class ModelList(Given):
    """Every name."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
