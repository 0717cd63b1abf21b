"""ModelFacts: the numbers of a loaded model and of its KV cache that the host reads.

Owns nothing that changes. Made once, when a rank has started (`nv_engine.device.start`).
"""

from dataclasses import dataclass

from nv_engine.config import LARGEST
from nv_engine.mixed import MixedSteps


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the host must know of the loaded model and of the memory left for its KV cache."""

    vocab_size: int
    """Token ids are 0 .. vocab_size - 1."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a completion."""
    max_model_len: int
    """Most tokens of a sequence, prompt and completion: the option or the model's own, if less."""
    num_blocks: int
    """Blocks of the KV cache (with several ranks: the minimum)."""
    block_size: int
    """Tokens in a block."""
    own_model_len: int = LARGEST
    """The model's own longest sequence, whatever max_model_len asks for."""
    mixed_steps: MixedSteps | None = None
    """How prompts come in beside decoding rows; None: as max_num_batched_tokens allows."""
    num_ids: int | None = None
    """Ids from here on are drawn only for requests that name them; None: all are."""
