"""The shapes of /v1/load_lora_adapter and /v1/unload_lora_adapter; vLLM's."""

from nv_api.server.protocol.fields import Asked


class LoadAdapterRequest(Asked):
    """An adapter to offer."""

    lora_name: str
    lora_path: str
    """A folder of the server's machine, or a hub name."""
    load_inplace: bool | None = None
    """Replace the adapter of that name."""


class UnloadAdapterRequest(Asked):
    """An adapter to offer no longer."""

    lora_name: str
