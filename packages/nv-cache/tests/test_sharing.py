"""Sharing: partial hits, copies of a prefix, forks, chains, the order of eviction."""

import pytest
from nv_cache import BlockManager, Copy


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_salts_share_nothing(serve) -> None:
    blocks = BlockManager(8, 32)
    tokens = numbers(64)
    serve(blocks, tokens, b"tenant")
    assert blocks.match(tokens).num_cached == 0
    assert blocks.match(tokens, b"other").num_cached == 0
    assert blocks.match(tokens, b"tenant").num_cached == 48


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


def test_of_two_copies_the_newest_is_found() -> None:
    """The older one may be evicted sooner: a hit on the newest leaves more to find."""
    blocks = BlockManager(4, 32)
    tokens = numbers(33)
    tables = [blocks.match(tokens[:32]) for _ in range(2)]
    for table in tables:
        assert blocks.extend(table, 32)
        blocks.publish(table, tokens, 32)
    older, newest = tables
    assert blocks.match(tokens).ids == newest.ids != older.ids


def test_a_prefix_outlives_its_tail(serve) -> None:
    blocks = BlockManager(4, 16)
    tokens = numbers(65)
    blocks.free(serve(blocks, tokens[:64]))
    for left in (3, 2, 1, 0):
        other = blocks.match([7])
        assert blocks.extend(other, 1)
        hit = blocks.match(tokens)
        assert hit.num_cached == left * 16
        blocks.free(hit)


def test_blocks_without_content_are_reused_first(serve) -> None:
    blocks = BlockManager(4, 16)
    cached = serve(blocks, numbers(32))
    plain = blocks.match([1])
    assert blocks.extend(plain, 32)
    blocks.free(cached)
    blocks.free(plain)
    blocks.extend(blocks.match([2]), 32)
    assert blocks.stats.evictions == 0
    assert blocks.match(numbers(33)).num_cached == 32


def test_a_partial_hit_names_its_copy_and_pins_the_source(serve) -> None:
    blocks = BlockManager(4, 64)
    owner = serve(blocks, numbers(128))
    table = blocks.match([*numbers(100), *numbers(20, 900)])
    assert table.ids[0] == owner.ids[0]
    assert table.copies == [Copy(owner.ids[1], table.ids[1], 32)]
    assert table.ids[1] not in owner.ids
    assert table.num_cached == 96
    blocks.free(owner)
    assert blocks.num_free == 1  # the source is held although its owner was freed
    blocks.check([table])
    blocks.copied(table)
    assert table.copies == []
    assert blocks.num_free == 2
    blocks.check([table])
    blocks.copied(table)  # a second call does nothing
    blocks.check([table])


def test_freeing_a_table_with_copies_outstanding_unpins_the_source(serve) -> None:
    blocks = BlockManager(3, 64)
    blocks.free(serve(blocks, numbers(64)))
    table = blocks.match(numbers(40))
    assert len(table.copies) == 1
    blocks.free(table)
    assert blocks.num_free == 3
    blocks.check([])


@pytest.mark.parametrize(("num_blocks", "cached"), [(1, 0), (2, 32)])
def test_a_partial_hit_without_room_is_left_out(serve, num_blocks, cached) -> None:
    blocks = BlockManager(num_blocks, 64)
    blocks.free(serve(blocks, numbers(64)))
    table = blocks.match(numbers(40))
    assert table.num_cached == cached
    blocks.check([table])
    blocks.free(table)
    if not cached:
        assert blocks.num_cached_blocks == 1  # and the source was not evicted for it


def test_the_longest_beginning_wins(serve) -> None:
    blocks = BlockManager(16, 128)
    for shared in (16, 96, 48):
        serve(blocks, [*numbers(shared), *numbers(128 - shared, 1000 * shared)])
    for length, cached in ((17, 16), (50, 48), (95, 80), (96, 96), (128, 96)):
        table = blocks.match([*numbers(min(length, 127)), 5])
        assert table.num_cached == cached
        blocks.free(table)


def test_a_block_of_16_has_no_partial_hits(serve) -> None:
    blocks = BlockManager(8, 16)
    serve(blocks, numbers(32))
    assert blocks.match(numbers(31)).num_cached == 16
    assert blocks.stats.partial_hits == 0


def test_a_short_prompt_is_reused_before_its_block_is_full(serve) -> None:
    blocks = BlockManager(4, 256)
    running = serve(blocks, numbers(200))
    table = blocks.match([*numbers(180), 1, 2, 3])
    assert table.copies == [Copy(running.ids[0], table.ids[0], 176)]


def test_a_long_tail_of_a_shared_block_is_published_once(serve) -> None:
    blocks = BlockManager(8, 64)
    parent = serve(blocks, numbers(20))
    assert blocks.extend(parent, 44)
    child = blocks.fork(parent)
    assert child.ids == parent.ids
    for table in (child, parent):
        blocks.publish(table, numbers(64), 64)
        blocks.check([parent, child])
    assert blocks.num_cached_blocks == 1


def test_fork_shares_full_blocks_and_copies_the_last(serve) -> None:
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


def test_fork_of_fewer_tokens_leaves_the_rest_to_the_first(serve) -> None:
    blocks = BlockManager(6, 32)
    parent = serve(blocks, numbers(80))
    assert blocks.extend(parent, 16)
    child = blocks.fork(parent, 63)
    assert child.ids[0] == parent.ids[0]
    assert child.copies == [Copy(parent.ids[1], child.ids[1], 31)]
    assert (child.num_tokens, child.num_published) == (63, 32)
    blocks.check([parent, child])
    assert blocks.fork(parent, 64).ids == parent.ids[:2]
    with pytest.raises(ValueError, match="num_tokens is 97: the table has room for 96"):
        blocks.fork(parent, 97)


def test_fork_at_a_boundary_copies_nothing_and_without_room_does_nothing(serve) -> None:
    blocks = BlockManager(2, 32)
    parent = serve(blocks, numbers(64))
    child = blocks.fork(parent)
    assert (child.ids, child.copies) == (parent.ids, [])
    blocks.free(child)
    blocks.free(parent)
    parent = serve(blocks, numbers(40, 300))
    assert blocks.fork(parent) is None
    blocks.check([parent])


def test_a_preempted_sequence_finds_what_it_generated_and_hashes_only_what_is_new(serve) -> None:
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


def test_a_waiting_prompt_is_hashed_once(serve) -> None:
    blocks = BlockManager(8, 32)
    waiting = blocks.match(numbers(96))
    blocks.free(waiting)
    serve(blocks, numbers(64))
    again = blocks.match([-1] * 64 + numbers(32, 64), chain=waiting.chain)
    assert again.num_cached == 64


def test_a_block_with_another_parent_is_not_a_hit(serve) -> None:
    blocks = BlockManager(4, 16)
    one = serve(blocks, numbers(32))
    other = serve(blocks, [5] * 16)
    colliding = other.chain.fork(1)  # as if the digests of two prefixes collided
    colliding.digests.append(one.chain.digests[1])
    table = blocks.match([5] * 16 + numbers(20, 16), chain=colliding)
    assert table.ids == other.ids
    assert table.num_cached == 16


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (16, 0), (17, 16), (64, 48), (65, 64)])
def test_one_token_is_always_left(serve, length, cached) -> None:
    blocks = BlockManager(8, 64)
    serve(blocks, numbers(200))
    assert blocks.match(numbers(length)).num_cached == cached
