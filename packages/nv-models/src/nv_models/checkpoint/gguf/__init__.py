"""GGUF files: the header, the tensors, and a folder with the config and tokenizer they carry.

Owns the check that the extra `nv-models[gguf]` is installed. Reading a header or an existing folder
does not need it.
"""

import importlib.util


def require_extra() -> None:
    """Raise ImportError with the fix where the gguf library is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("GGUF files need the gguf library: pip install 'nv-models[gguf]'")
