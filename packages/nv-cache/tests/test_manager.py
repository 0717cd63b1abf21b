"""One behaviour a test, and the cases of conformance that are the cache's."""

import copy as copying
import random

import pytest
from nv_cache import BlockManager, BlockTable, Copy


def serve(blocks: BlockManager, tokens: list[int], salt: bytes = b"") -> BlockTable:
    """Match, make room, compute and publish, as an engine does."""
    table = blocks.match(tokens, salt)
    blocks.copied(table)
    assert blocks.extend(table, len(tokens) - table.num_tokens)
    blocks.publish(table, tokens, len(tokens))
    return table


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_has_a_block(num_blocks) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}"):
        BlockManager(num_blocks, 16)


@pytest.mark.parametrize("block_size", [-64, 0, 1, 8, 17, 48, 96, 100])
def test_a_block_size_outside_the_contract(block_size) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}"):
        BlockManager(4, block_size)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 192, 256, 1024])
def test_a_block_size_within_the_contract(block_size) -> None:
    assert BlockManager(4, block_size).block_size == block_size


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_n20_a_prompt_of_full_blocks_leaves_tokens_to_compute(block_size, k) -> None:
    blocks = BlockManager(8, block_size)
    tokens = numbers(k * block_size)
    serve(blocks, tokens)
    again = blocks.match(tokens)
    assert again.num_cached == len(tokens) - 16
    assert again.num_cached == again.num_tokens < len(tokens)


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (16, 0), (17, 16), (64, 48), (65, 64)])
def test_one_token_is_always_left(length, cached) -> None:
    blocks = BlockManager(8, 64)
    serve(blocks, numbers(200))
    assert blocks.match(numbers(length)).num_cached == cached


def test_nothing_is_matched_by_nothing() -> None:
    table = BlockManager(1, 16).match([])
    assert (table.ids, table.num_tokens, table.copies) == ([], 0, [])


def test_n21_identical_prompts_in_one_cold_call_share_nothing_uncomputed() -> None:
    blocks = BlockManager(32, 32)
    tokens = numbers(96)
    tables = [blocks.match(tokens) for _ in range(8)]
    for table in tables:
        assert table.num_cached == 0
        assert blocks.extend(table, 96)
    assert len({block for table in tables for block in table.ids}) == 24
    assert blocks.match(tokens).num_cached == 0  # room is not content
    for table in tables:
        blocks.publish(table, tokens, 96)
    assert blocks.match([*tokens, 1]).num_cached == 96
    blocks.check()


def test_n23_the_chain_counts_not_the_content() -> None:
    blocks = BlockManager(8, 32)
    a, b, c = numbers(32), numbers(32, 100), numbers(32, 200)
    serve(blocks, a + b + c)
    assert blocks.match(b + c).num_cached == 0
    assert blocks.match(a + c + b).num_cached == 32
    assert blocks.match([*a, *b, *c, 0]).num_cached == 96


def test_n26_a_reused_block_is_not_found_and_the_map_stays_bounded() -> None:
    blocks = BlockManager(2, 32)
    draw = random.Random(0)
    before: list[int] = []
    for cycle in range(100_000):
        tokens = [draw.randrange(2**32) for _ in range(2)] * 30  # 60 tokens: both blocks
        blocks.free(serve(blocks, tokens))
        if before:
            stale = blocks.match(before)
            assert stale.num_cached == 0
        before = tokens
        assert blocks.num_cached_blocks <= 2
        if cycle % 1000 == 0:
            blocks.check([])
    assert blocks.stats.evictions == 2 * 100_000 - 2


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


def test_n28_after_reset_nothing_old_is_found_or_published() -> None:
    blocks = BlockManager(8, 32)
    tokens = numbers(70)
    running = serve(blocks, tokens[:40])
    blocks.free(serve(blocks, numbers(40, 500)))
    blocks.reset()
    blocks.check([running])
    assert blocks.num_cached_blocks == 0
    assert blocks.match(tokens).num_cached == 0
    # The running sequence stays valid, yet what it computes rests on the old weights.
    assert blocks.extend(running, 30)
    child = blocks.fork(running)
    blocks.copied(child)
    for table in (running, child):
        blocks.publish(table, tokens, 70)
    assert blocks.match(tokens).num_cached == 0
    blocks.free(running)
    blocks.free(child)
    blocks.free(serve(blocks, tokens))
    assert blocks.match(tokens).num_cached == 64
    blocks.check()


def test_salts_share_nothing() -> None:
    blocks = BlockManager(8, 32)
    tokens = numbers(64)
    serve(blocks, tokens, b"tenant")
    assert blocks.match(tokens).num_cached == 0
    assert blocks.match(tokens, b"other").num_cached == 0
    assert blocks.match(tokens, b"tenant").num_cached == 48


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = BlockManager(8, 32, enable_prefix_caching=False)
    tokens = numbers(64)
    serve(blocks, tokens)
    again = blocks.match(tokens)
    assert (again.num_cached, again.copies, blocks.num_cached_blocks) == (0, [], 0)
    assert not again.chain.digests


def test_a_match_is_pinned_at_once() -> None:
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
    with pytest.raises(ValueError, match="upto is 41; the table has room for 40"):
        blocks.publish(table, tokens, 41)
    with pytest.raises(ValueError, match="30 are given"):
        blocks.publish(table, tokens[:30], 32)
    blocks.free(table)
    with pytest.raises(ValueError, match="room for 0"):
        blocks.publish(table, tokens, 32)


def test_publish_waits_for_the_copy() -> None:
    blocks = BlockManager(8, 32)
    serve(blocks, numbers(32))
    table = blocks.match(numbers(30))
    assert blocks.extend(table, 20)
    with pytest.raises(ValueError, match="outstanding"):
        blocks.publish(table, numbers(36), 36)
    with pytest.raises(ValueError, match="outstanding"):
        blocks.fork(table)
    blocks.copied(table)
    blocks.publish(table, numbers(36), 36)


def test_a_duplicates_eviction_does_not_lose_a_live_hit() -> None:
    for freed_first in (0, 1):
        blocks = BlockManager(2, 32)
        tokens = numbers(33)
        tables = [blocks.match(tokens[:32]) for _ in range(2)]
        for table in tables:
            assert blocks.extend(table, 32)
        for table in tables:
            blocks.publish(table, tokens, 32)
        gone, kept = tables[freed_first], tables[1 - freed_first]
        blocks.free(gone)
        other = blocks.match([9])
        assert blocks.extend(other, 1)  # evicts the copy that was freed
        blocks.check([kept, other])
        assert blocks.stats.evictions == 1
        hit = blocks.match(tokens)
        assert hit.ids == kept.ids
        blocks.check([kept, other, hit])


def test_a_prefix_outlives_its_tail() -> None:
    blocks = BlockManager(4, 16)
    tokens = numbers(65)
    blocks.free(serve(blocks, tokens[:64]))
    for left in (3, 2, 1, 0):
        other = blocks.match([7])
        assert blocks.extend(other, 1)
        hit = blocks.match(tokens)
        assert hit.num_cached == left * 16
        blocks.free(hit)


def test_blocks_without_content_are_reused_first() -> None:
    blocks = BlockManager(4, 16)
    cached = serve(blocks, numbers(32))
    plain = blocks.match([1])
    assert blocks.extend(plain, 32)
    blocks.free(cached)
    blocks.free(plain)
    blocks.extend(blocks.match([2]), 32)
    assert blocks.stats.evictions == 0
    assert blocks.match(numbers(33)).num_cached == 32


def test_a_partial_hit_names_its_copy_and_pins_the_source() -> None:
    blocks = BlockManager(4, 64)
    owner = serve(blocks, numbers(128))
    table = blocks.match([*numbers(100), *numbers(20, 900)])
    assert table.ids[0] == owner.ids[0]
    assert table.copies == [Copy(owner.ids[1], table.ids[1], 32)]
    assert table.ids[1] not in owner.ids
    assert table.num_cached == 96
    blocks.free(owner)
    assert blocks.num_free == 1  # the source is held although its owner is gone
    blocks.check([table])
    blocks.copied(table)
    assert table.copies == []
    assert blocks.num_free == 2
    blocks.check([table])
    blocks.copied(table)  # once is enough
    blocks.check([table])


def test_freeing_a_table_with_copies_outstanding_unpins_the_source() -> None:
    blocks = BlockManager(3, 64)
    blocks.free(serve(blocks, numbers(64)))
    table = blocks.match(numbers(40))
    assert len(table.copies) == 1
    blocks.free(table)
    assert blocks.num_free == 3
    blocks.check([])


@pytest.mark.parametrize(("num_blocks", "cached"), [(1, 0), (2, 32)])
def test_a_partial_hit_without_room_is_left_out(num_blocks, cached) -> None:
    blocks = BlockManager(num_blocks, 64)
    blocks.free(serve(blocks, numbers(64)))
    table = blocks.match(numbers(40))
    assert table.num_cached == cached
    blocks.check([table])
    blocks.free(table)
    if not cached:
        assert blocks.num_cached_blocks == 1  # and the source was not given up for it


def test_the_longest_beginning_wins() -> None:
    blocks = BlockManager(16, 128)
    for shared in (16, 96, 48):
        serve(blocks, [*numbers(shared), *numbers(128 - shared, 1000 * shared)])
    for length, cached in ((17, 16), (50, 48), (95, 80), (96, 96), (128, 96)):
        table = blocks.match([*numbers(min(length, 127)), 5])
        assert table.num_cached == cached
        blocks.free(table)


def test_a_block_of_16_has_no_partial_hits() -> None:
    blocks = BlockManager(8, 16)
    serve(blocks, numbers(32))
    assert blocks.match(numbers(31)).num_cached == 16
    assert blocks.stats.partial_hits == 0


def test_a_short_prompt_is_reused_before_its_block_is_full() -> None:
    blocks = BlockManager(4, 256)
    running = serve(blocks, numbers(200))
    table = blocks.match([*numbers(180), 1, 2, 3])
    assert table.copies == [Copy(running.ids[0], table.ids[0], 176)]


def test_a_long_tail_of_a_shared_block_is_published_once() -> None:
    blocks = BlockManager(8, 64)
    parent = serve(blocks, numbers(20))
    assert blocks.extend(parent, 44)
    child = blocks.fork(parent)
    assert child.ids == parent.ids
    for table in (child, parent):
        blocks.publish(table, numbers(64), 64)
        blocks.check([parent, child])
    assert blocks.num_cached_blocks == 1


def test_fork_shares_full_blocks_and_copies_the_last() -> None:
    blocks = BlockManager(4, 32)
    parent = serve(blocks, numbers(40))
    child = blocks.fork(parent)
    assert child.ids[0] == parent.ids[0]
    assert child.copies == [Copy(parent.ids[1], child.ids[1], 8)]
    assert (child.num_tokens, child.num_cached) == (40, 40)
    blocks.check([parent, child])
    blocks.free(parent)
    blocks.copied(child)
    assert blocks.extend(child, 24)
    theirs = [*numbers(40), *numbers(24, 700)]
    blocks.publish(child, theirs, 64)
    assert blocks.match([*theirs, 0]).num_cached == 64
    assert blocks.match([*numbers(64), 0]).num_cached == 32


def test_fork_at_a_boundary_copies_nothing_and_without_room_does_nothing() -> None:
    blocks = BlockManager(2, 32)
    parent = serve(blocks, numbers(64))
    child = blocks.fork(parent)
    assert (child.ids, child.copies) == (parent.ids, [])
    blocks.free(child)
    blocks.free(parent)
    parent = serve(blocks, numbers(40, 300))
    assert blocks.fork(parent) is None
    blocks.check([parent])


def test_free_twice_is_once() -> None:
    blocks = BlockManager(4, 16)
    table = serve(blocks, numbers(40))
    blocks.free(table)
    blocks.free(table)
    assert (table.ids, table.num_tokens, table.num_cached) == ([], 0, 0)
    blocks.check([])
    assert blocks.num_free == 4


def test_two_frees_of_one_hold_are_caught() -> None:
    blocks = BlockManager(4, 16)
    table = serve(blocks, numbers(40))
    twin = copying.copy(table)
    blocks.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(twin)


def test_check_sees_a_leak() -> None:
    blocks = BlockManager(4, 16)
    table = serve(blocks, numbers(40))
    blocks.check([table])
    with pytest.raises(AssertionError, match="1 holds, 0 in tables"):
        blocks.check([])


def test_a_preempted_sequence_finds_what_it_generated_and_hashes_only_what_is_new() -> None:
    blocks = BlockManager(8, 32)
    tokens = numbers(70)
    table = serve(blocks, tokens)
    tokens += numbers(30, 500)
    assert blocks.extend(table, 30)
    blocks.publish(table, tokens, 99)
    chain = table.chain
    blocks.free(table)
    hashed = list(chain.digests)
    again = blocks.match([-1] * 96 + tokens[96:], chain=chain)  # the covered tokens are not read
    assert again.num_cached == 96
    assert again.chain is chain
    assert chain.digests == hashed


def test_a_waiting_prompt_is_hashed_once() -> None:
    blocks = BlockManager(8, 32)
    waiting = blocks.match(numbers(96))
    blocks.free(waiting)
    serve(blocks, numbers(64))
    again = blocks.match([-1] * 64 + numbers(32, 64), chain=waiting.chain)
    assert again.num_cached == 64


def test_a_chain_of_another_kind_is_refused() -> None:
    blocks = BlockManager(8, 32)
    chain = blocks.match(numbers(40), b"tenant").chain
    assert blocks.match(numbers(40), chain=chain).chain is chain
    assert blocks.match(numbers(40), b"tenant", chain).chain is chain
    with pytest.raises(ValueError, match="salt"):
        blocks.match(numbers(40), b"other", chain)
    with pytest.raises(ValueError, match="block_size 32"):
        BlockManager(8, 64).match(numbers(40), chain=chain)


def test_stats_count_blocks_and_tokens() -> None:
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


def test_a_block_with_another_parent_is_not_believed() -> None:
    blocks = BlockManager(4, 16)
    one = serve(blocks, numbers(32))
    other = serve(blocks, [5] * 16)
    colliding = other.chain.fork(1)  # as if the second block's name met another prefix's
    colliding.digests.append(one.chain.digests[1])
    table = blocks.match([5] * 16 + numbers(20, 16), chain=colliding)
    assert table.ids == other.ids
    assert table.num_cached == 16
