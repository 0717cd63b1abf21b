"""Arguments, room, publishing, freeing, counting."""

import copy as copying

import pytest
from nv_cache import BlockManager


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}"):
        BlockManager(num_blocks, 16)


@pytest.mark.parametrize("block_size", [-64, 0, 1, 8, 17, 48, 96, 100])
def test_a_block_size_outside_the_contract_is_refused(block_size) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}"):
        BlockManager(4, block_size)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 192, 256, 1024])
def test_a_block_size_within_the_contract_is_accepted(block_size) -> None:
    assert BlockManager(4, block_size).block_size == block_size


def test_an_empty_prompt_matches_nothing() -> None:
    table = BlockManager(1, 16).match([])
    assert (table.ids, table.num_tokens, table.copies) == ([], 0, [])


def test_without_prefix_caching_nothing_is_found(serve) -> None:
    blocks = BlockManager(8, 32, enable_prefix_caching=False)
    tokens = numbers(64)
    serve(blocks, tokens)
    again = blocks.match(tokens)
    assert (again.num_cached, again.copies, blocks.num_cached_blocks) == (0, [], 0)
    assert not again.chain.digests


def test_a_match_is_pinned_at_once(serve) -> None:
    blocks = BlockManager(3, 16)
    blocks.free(serve(blocks, numbers(32)))
    table = blocks.match(numbers(40))
    assert table.num_cached == 32
    assert blocks.num_free == 1
    greedy = blocks.match([1000])
    assert not blocks.extend(greedy, 17)
    assert blocks.extend(greedy, 16)
    assert not set(greedy.ids) & set(table.ids)


def test_extend_is_all_or_nothing() -> None:
    blocks = BlockManager(3, 16)
    table = blocks.match([1])
    assert blocks.extend(table, 10)
    assert not blocks.extend(table, 39)
    assert (len(table.ids), table.num_tokens, blocks.num_free) == (1, 10, 2)
    assert blocks.extend(table, 38)
    assert (len(table.ids), table.num_tokens, blocks.num_free) == (3, 48, 0)
    assert blocks.extend(table, 0)
    with pytest.raises(ValueError, match="n is -1"):
        blocks.extend(table, -1)


def test_publish_takes_many_blocks_at_once_and_is_idempotent() -> None:
    blocks = BlockManager(8, 32)
    tokens = numbers(100)
    table = blocks.match(tokens)
    assert blocks.extend(table, 100)
    for upto in (0, 15, 100, 100, 40, 100):
        blocks.publish(table, tokens, upto)
        blocks.check([table])
    assert blocks.num_cached_blocks == 3
    assert blocks.match([*tokens[:96], 5]).ids == table.ids[:3]


@pytest.mark.parametrize(("upto", "cached"), [(31, 16), (32, 32), (63, 48), (64, 64), (95, 80)])
def test_publish_stops_where_the_computed_tokens_stop(upto, cached) -> None:
    blocks = BlockManager(8, 32)
    tokens = numbers(96)
    table = blocks.match(tokens)
    assert blocks.extend(table, 96)
    blocks.publish(table, tokens, upto)
    assert blocks.match([*tokens, 0]).num_cached == cached


def test_publish_refuses_what_cannot_be_computed() -> None:
    blocks = BlockManager(8, 32)
    tokens = numbers(96)
    table = blocks.match(tokens)
    assert blocks.extend(table, 40)
    with pytest.raises(ValueError, match="upto is 41: the table has room for 40"):
        blocks.publish(table, tokens, 41)
    with pytest.raises(ValueError, match="30 are given"):
        blocks.publish(table, tokens[:30], 32)
    blocks.free(table)
    with pytest.raises(ValueError, match="room for 0"):
        blocks.publish(table, tokens, 32)


def test_publish_waits_for_the_copy(serve) -> None:
    blocks = BlockManager(8, 32)
    serve(blocks, numbers(32))
    table = blocks.match(numbers(30))
    assert blocks.extend(table, 20)
    with pytest.raises(ValueError, match="queue them and call copied"):
        blocks.publish(table, numbers(36), 36)
    with pytest.raises(ValueError, match="queue them and call copied"):
        blocks.fork(table)
    blocks.copied(table)
    blocks.publish(table, numbers(36), 36)


def test_freeing_a_table_twice_frees_its_blocks_once(serve) -> None:
    blocks = BlockManager(4, 16)
    table = serve(blocks, numbers(40))
    blocks.free(table)
    blocks.free(table)
    assert (table.ids, table.num_tokens, table.num_cached) == ([], 0, 0)
    blocks.check([])
    assert blocks.num_free == 4


def test_two_frees_of_one_hold_are_caught(serve) -> None:
    blocks = BlockManager(4, 16)
    table = serve(blocks, numbers(40))
    twin = copying.copy(table)
    blocks.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(twin)


def test_check_sees_a_leak(serve) -> None:
    blocks = BlockManager(4, 16)
    table = serve(blocks, numbers(40))
    blocks.check([table])
    with pytest.raises(AssertionError, match="1 references, 0 in tables"):
        blocks.check([])


def test_a_chain_of_another_kind_is_refused() -> None:
    blocks = BlockManager(8, 32)
    chain = blocks.match(numbers(40), b"tenant").chain
    assert blocks.match(numbers(40), chain=chain).chain is chain
    assert blocks.match(numbers(40), b"tenant", chain).chain is chain
    with pytest.raises(ValueError, match="salt"):
        blocks.match(numbers(40), b"other", chain)
    with pytest.raises(ValueError, match="block_size 32"):
        BlockManager(8, 64).match(numbers(40), chain=chain)


def test_stats_count_blocks_and_tokens(serve) -> None:
    blocks = BlockManager(4, 32)
    blocks.free(serve(blocks, numbers(64)))
    before = blocks.stats
    table = blocks.match([*numbers(50), *numbers(50, 800)])
    assert (before.hits, before.misses, before.query_tokens) == (0, 1, 64)
    stats = blocks.stats
    assert (stats.hits, stats.partial_hits, stats.misses) == (1, 1, 3)
    assert (stats.query_tokens, stats.hit_tokens) == (164, 48)
    assert stats.evictions == 0
    blocks.copied(table)
    assert blocks.extend(table, 80)
    assert blocks.stats.evictions == 1
