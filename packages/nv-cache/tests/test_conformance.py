"""The conformance cases of the cache, by their numbers."""

import random

import pytest
from nv_cache import BlockManager


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_n20_a_prompt_of_full_blocks_leaves_tokens_to_compute(serve, block_size, k) -> None:
    blocks = BlockManager(8, block_size)
    tokens = numbers(k * block_size)
    serve(blocks, tokens)
    again = blocks.match(tokens)
    assert again.num_cached == len(tokens) - 16
    assert again.num_cached == again.num_tokens < len(tokens)


def test_n21_identical_prompts_in_one_cold_call_share_nothing_uncomputed() -> None:
    blocks = BlockManager(32, 32)
    tokens = numbers(96)
    tables = [blocks.match(tokens) for _ in range(8)]
    for table in tables:
        assert table.num_cached == 0
        assert blocks.extend(table, 96)
    assert len({block for table in tables for block in table.ids}) == 24
    assert blocks.match(tokens).num_cached == 0  # a block that was not published has no content
    for table in tables:
        blocks.publish(table, tokens, 96)
    assert blocks.match([*tokens, 1]).num_cached == 96
    blocks.check()


def test_n23_equal_blocks_after_different_prefixes_differ(serve) -> None:
    blocks = BlockManager(8, 32)
    a, b, c = numbers(32), numbers(32, 100), numbers(32, 200)
    serve(blocks, a + b + c)
    assert blocks.match(b + c).num_cached == 0
    assert blocks.match(a + c + b).num_cached == 32
    assert blocks.match([*a, *b, *c, 0]).num_cached == 96


@pytest.mark.parametrize(("num_blocks", "length", "cycles"), [(2, 60, 100_000), (1, 32, 10_000)])
def test_n26_a_reused_block_is_not_found_and_the_map_stays_bounded(
    serve, num_blocks, length, cycles
) -> None:
    blocks = BlockManager(num_blocks, 32)
    draw = random.Random(0)
    before: list[int] = []
    for cycle in range(cycles):
        tokens = [draw.randrange(2**32) for _ in range(2)] * (length // 2)  # all the blocks
        blocks.free(serve(blocks, tokens))
        if before:
            stale = blocks.match([*before, 0])
            assert stale.num_cached == 0
        fresh = blocks.match([*tokens, 0])
        assert fresh.num_cached >= 32
        blocks.copied(fresh)
        blocks.free(fresh)
        before = tokens
        assert blocks.num_cached_blocks <= num_blocks
        if cycle % 1000 == 0:
            blocks.check([])
    assert blocks.stats.evictions == num_blocks * (cycles - 1)


@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_n27_blocks_are_exactly_what_the_tokens_need(block_size, extra) -> None:
    blocks = BlockManager(8, block_size)
    length = block_size + extra
    table = blocks.match(numbers(length))
    assert blocks.extend(table, length)
    for num_tokens in range(length, length + block_size + 2):
        assert table.num_tokens == num_tokens
        assert len(table.ids) == -(-num_tokens // block_size)
        assert blocks.extend(table, 1)


def test_n28_after_reset_nothing_old_is_found_or_published(serve) -> None:
    blocks = BlockManager(8, 32)
    tokens = numbers(70)
    running = serve(blocks, tokens[:40])
    blocks.free(serve(blocks, numbers(40, 500)))
    blocks.reset()
    blocks.check([running])
    assert blocks.num_cached_blocks == 0
    assert blocks.match(tokens).num_cached == 0
    # The running sequence stays valid, but its keys and values come from the old weights.
    assert blocks.extend(running, 30)
    child = blocks.fork(running)
    blocks.copied(child)
    for table in (running, child):
        blocks.publish(table, tokens, 70)
    assert blocks.num_cached_blocks == 0
    assert blocks.match(tokens).num_cached == 0
    blocks.free(serve(blocks, tokens[:32]))
    assert blocks.match(tokens).num_cached == 32  # the new block, without the old one after it
    blocks.free(running)
    blocks.free(child)
    blocks.free(serve(blocks, tokens))
    assert blocks.match(tokens).num_cached == 64
    blocks.check()
