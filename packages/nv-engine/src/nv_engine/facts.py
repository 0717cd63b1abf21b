"""ModelFacts: the numbers of a loaded model and of its KV cache that the host reads.

Owns nothing that changes. Made once, when a rank has started (`nv_engine.device.start`).
"""

from dataclasses import dataclass

from nv_models.adapters.targets import AdapterTargets

from nv_engine.mixed import MixedSteps
from nv_engine.values import MAX_COUNT


@dataclass(frozen=True, kw_only=True)
class PoolingFacts:
    """Of a runner that pools; frozen."""

    tasks: tuple[str, ...]
    """Those of `nv_engine.pooling_params.TASKS` that the model has."""
    width: int
    """Values of a result: the embedding's length, or the number of labels."""
    reads_whole_prompt: bool
    """Whether a prompt's own result is made of all its tokens' states, not the last's alone."""


@dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """Of a runner with room for adapters; frozen."""

    num_slots: int
    """Adapters that may run at once."""
    num_images: int
    """Adapters that each rank keeps in its host's memory."""
    max_rank: int
    targets: AdapterTargets
    """The modules that may have one."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Of one runner; frozen."""

    vocab_size: int
    """Token ids are 0 .. vocab_size - 1."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a completion."""
    max_model_len: int
    """Most tokens of a sequence, prompt and completion: the option or the model's own, if less."""
    num_blocks: int
    """Blocks of the KV cache (with several ranks: the minimum)."""
    block_size: int
    """Tokens per block."""
    own_model_len: int = MAX_COUNT
    """The model's own longest sequence, whatever max_model_len asks for."""
    length_place: str = "its files"
    """Which field of which of the model's files gives `own_model_len`."""
    mixed_steps: MixedSteps | None = None
    """Tokens of prompts in a step beside decoding rows; None: up to max_num_batched_tokens."""
    num_ids: int | None = None
    """Ids from here on are drawn only for requests that name them; None: all are."""
    pooling: PoolingFacts | None = None
    """The results that the runner makes of prompts; None: it draws tokens."""
    adapters: AdapterFacts | None = None
    """None: the model was loaded without adapters."""
