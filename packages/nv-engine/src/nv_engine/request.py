"""EngineRequest: one prompt and what is asked of its completions.

Owns the record that travels from text to tokens. Never checks it: the engine does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nv_engine.grammar import Grammar
from nv_engine.lora_request import LoRARequest
from nv_engine.params import SamplingParams
from nv_engine.pooling_params import PoolingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt, which an engine completes `params.n` times, or pools.

    Attributes:
        token_ids: the prompt: [num_tokens] token ids.
        params: its sampling parameters; the engine keeps a copy of its own. Without a seed, the
            request draws by (engine seed, number of requests before it). An engine that pools
            takes PoolingParams with a task.
        grammar: what `params.structured_outputs` asks for, compiled; None if it asks for nothing.
        request_id: an id from 0 to 2**63 - 1 that no unfinished request has; None: the next free
            one.
        lora: the adapter that it is computed with; None: the base model alone.
        cache_salt: only requests with an equal salt share blocks of the prefix cache: 1 to 256
            characters. None: shared with all other requests without a salt.
    """

    token_ids: Iterable[int]
    params: SamplingParams | PoolingParams
    grammar: Grammar | None = None
    request_id: int | None = None
    cache_salt: str | None = None
    lora: LoRARequest | None = None
