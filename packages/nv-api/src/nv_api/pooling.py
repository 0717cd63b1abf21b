"""PoolingParams: what is made of a prompt's hidden states instead of text.

Owns the fields; no pooling task is built yet, so `LLM.encode` and its kin refuse them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of a pooling request; names and meanings follow vLLM.

    Attributes:
        truncate_prompt_tokens: keep only this many of the prompt's last tokens; None keeps all.
        dimensions: length of an embedding (Matryoshka models); None is the model's own.
        normalize: scale an embedding to length 1; None is the model's own choice.
        task: "embed", "classify", "score", "token_embed" or "token_classify".
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    task: str | None = None
