"""Makes `plain_cache` importable here."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nv_cache import BlockManager, BlockTable

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def serve() -> Callable[..., BlockTable]:
    """Match, make room, compute and publish, as an engine does."""

    def run(blocks: BlockManager, tokens: list[int], salt: bytes = b"") -> BlockTable:
        table = blocks.match(tokens, salt)
        blocks.copied(table)
        assert blocks.extend(table, len(tokens) - table.num_tokens)
        blocks.publish(table, tokens, len(tokens))
        return table

    return run
