"""The architecture of a GGUF file.

Owns the choice between architectures that llama.cpp gives one name. Never reads a size.
"""

from nv_models.architectures import GGUF_NAMES, gguf_architecture
from nv_models.checkpoint.gguf.header import Header


def architecture_of(header: Header) -> str:
    """A file's architecture, by its name in the table of architectures.

    Raises:
        ValueError: one that is not read from GGUF files.
    """
    name = header.architecture
    has_experts = bool(header.metadata.get(f"{name}.expert_count"))
    found = gguf_architecture(name, has_experts)
    if found is None:
        raise ValueError(
            f"{header.file} holds the architecture {name!r}, which is not supported; supported in "
            f"GGUF files are {', '.join(GGUF_NAMES)}"
        )
    return found
