"""The manager against plain dicts, in a long seeded loop."""

import random

import pytest
from plain_cache import Model, prompt


def step(model: Model, draw: random.Random, prompts: list[list[int]]) -> None:
    """One random operation. At most 5 sequences run, so that much of the pool is cached content."""
    choice = draw.random()
    if not model.sequences or (choice < 0.3 and len(model.sequences) < 5):
        sequence = model.match(draw.choice(prompts), draw.choice((b"", b"", b"", b"tenant")))
        model.copied(sequence)
        model.extend(sequence, [])
        return
    sequence = draw.choice(model.sequences)
    if choice < 0.5:
        model.extend(sequence, prompt([draw.randrange(2)] * 2, 0)[: draw.choice((0, 1, 1, 8, 32))])
    elif choice < 0.7:
        model.copied(sequence)
        model.publish(sequence, max(sequence.num_tokens - draw.choice((0, 0, 1, 20)), 0))
    elif choice < 0.73:
        if not sequence.copies:
            model.fork(sequence, max(sequence.num_tokens - draw.choice((0, 1, 40)), 0))
    elif choice < 0.78:
        model.preempt(sequence)
    elif choice < 0.9999:
        model.free(sequence)
    else:
        model.reset()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(14, 32), (24, 16), (8, 64), (6, 128)])
def test_a_million_random_operations_leak_nothing(num_blocks: int, block_size: int) -> None:
    """250,000 operations per shape."""
    draw = random.Random(0)
    model = Model(num_blocks, block_size)
    shared = [draw.randrange(2) for _ in range(9)]
    prompts = [
        prompt(shared[: draw.randrange(10)] + [draw.randrange(2)] * draw.randrange(3), length % 3)
        for length in range(50)
    ]
    for number in range(250_000):
        step(model, draw, prompts)
        model.agree()
        if number % 1000 == 0:
            model.check()
    stats = model.real.stats
    assert min(stats.hits, stats.misses, stats.evictions) > 1000
    assert stats.partial_hits > 1000 or block_size == 16
    model.finish()
