import pytest
from nv_cache import (
    BlockManager,
    BlockRemoved,
    BlockStored,
    CacheCleared,
    EventLog,
    HashChain,
)


def test_a_router_can_follow_what_is_stored(serve) -> None:
    log = EventLog()
    blocks = BlockManager(2, 32, events=log)
    tokens = list(range(64))
    table = serve(blocks, tokens)
    chain = HashChain(32)
    chain.extend(tokens, 2)
    one, two = chain.digests
    assert log.drain() == [BlockStored(one, chain.root), BlockStored(two, one)]
    assert log.drain() == []
    blocks.free(table)

    other = serve(blocks, [7] * 20)  # takes the tail's block; 20 tokens are not a full block
    assert log.drain() == [BlockRemoved(two)]
    blocks.free(other)
    blocks.reset()
    assert log.drain() == [CacheCleared()]


def test_copies_are_stored_once_and_removed_with_the_last() -> None:
    log = EventLog()
    blocks = BlockManager(2, 32, events=log)
    tokens = list(range(33))[:32]
    tables = [blocks.match(tokens) for _ in range(2)]
    for table in tables:
        assert blocks.extend(table, 32)
    for table in tables:
        blocks.publish(table, tokens, 32)
    assert [type(event) for event in log.drain()] == [BlockStored]
    for table in tables:
        blocks.free(table)
    first = blocks.match([9])
    assert blocks.extend(first, 1)
    assert log.drain() == []
    second = blocks.match([9])
    assert blocks.extend(second, 1)
    assert [type(event) for event in log.drain()] == [BlockRemoved]


def test_a_beginning_of_a_block_is_not_an_event(serve) -> None:
    log = EventLog()
    blocks = BlockManager(1, 64, events=log)
    blocks.free(serve(blocks, list(range(40))))
    blocks.free(serve(blocks, [5] * 40))
    assert blocks.stats.evictions == 1
    assert log.drain() == []


def test_a_full_log_drops_the_oldest_and_counts_it(serve) -> None:
    log = EventLog(capacity=2)
    blocks = BlockManager(3, 16, events=log)
    serve(blocks, list(range(48)))
    events = log.drain()
    assert len(events) == 2
    assert events[1].parent == events[0].digest
    assert log.num_dropped == 1


def test_a_log_of_capacity_0_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        EventLog(capacity=0)
