"""Keys: the names that a GGUF file has for the fields of config.json.

Owns the table by which errors about a converted config name the user's own file and its keys.
`metadata` translates the values.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nv_models.architectures import ARCHITECTURES

KEYS = {
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
OF_ROPE = {
    "attention_factor": "rope.scaling.attn_factor",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "rope_theta": "rope.freq_base",
}
"""Names that only the words "of the rope" make clear."""


@contextmanager
def naming_keys(file: Path, architecture: str) -> Iterator[None]:
    """Put a GGUF file's name and its keys into errors about the config that was made of it.

    Errors that name the file already are left alone.

    Args:
        file: the user's file.
        architecture: its `general.architecture`, with which its keys begin.
    """
    try:
        yield
    except ValueError as error:
        if str(file) in str(error):
            raise
        raise ValueError(f"{file}: {_with_keys(str(error), architecture)}") from error


def _with_keys(message: str, architecture: str) -> str:
    """A message with the keys of GGUF in place of the fields of config.json."""
    rows = [row for row in ARCHITECTURES.values() if row.gguf == architecture]
    keys = KEYS | {field: key for row in rows for key, field in row.gguf_fields.items()}
    fields = rf"\b({'|'.join(OF_ROPE)}) of the rope\b|\b({'|'.join(keys)})\b"

    def key(match: re.Match[str]) -> str:
        return f"{architecture}.{OF_ROPE[match[1]] if match[1] else keys[match[2]]}"

    return re.sub(fields, key, message)
