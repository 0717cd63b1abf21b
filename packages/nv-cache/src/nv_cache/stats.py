"""How well the cache does: counters since the manager was made.

Owns numbers only; never decides anything.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Counters; `BlockManager.stats` hands out a copy."""

    hits: int = 0
    """Full blocks that `match` found."""
    partial_hits: int = 0
    """Blocks of which `match` found a beginning."""
    misses: int = 0
    """Full blocks that `match` looked for and did not find whole."""
    evictions: int = 0
    """Blocks with findable content that were handed out for other content."""
    query_tokens: int = 0
    """Tokens given to `match`."""
    hit_tokens: int = 0
    """Tokens that `match` found, partial hits included."""
