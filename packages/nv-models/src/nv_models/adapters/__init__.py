"""Adapters of low rank (LoRA), as peft writes them: their files, and the pool that holds them.

Never decides which adapter a token has, or which of them stay in the pool.
"""

from nv_models.adapters.files import AdapterFiles
from nv_models.adapters.locate import largest_rank, resolve_adapter
from nv_models.adapters.pool import AdapterImage, AdapterPool, adapter_rank
from nv_models.adapters.targets import AdapterTargets

__all__ = [
    "AdapterFiles",
    "AdapterImage",
    "AdapterPool",
    "AdapterTargets",
    "adapter_rank",
    "largest_rank",
    "resolve_adapter",
]
