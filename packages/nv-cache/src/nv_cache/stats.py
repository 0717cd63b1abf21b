"""Counters of hits and misses since the manager was made."""

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Counters; `BlockManager.stats` returns a copy."""

    hits: int = 0
    """Full blocks that `match` found."""
    partial_hits: int = 0
    """Blocks of which `match` found only a beginning."""
    misses: int = 0
    """Full blocks that `match` looked up and did not find whole."""
    evictions: int = 0
    """Blocks with findable content that were reused for other content."""
    query_tokens: int = 0
    """Tokens given to `match`."""
    hit_tokens: int = 0
    """Tokens that `match` found, partial hits included."""
