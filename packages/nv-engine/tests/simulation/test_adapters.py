"""Adapters in the simulator: the fake device's tokens differ where another adapter is in a slot."""

import random

import pytest
from nv_engine.params import SamplingParams
from nv_engine.scheduling.adapter_slots import MAX_PASSED
from simulated_engine import greedy, prompt_of
from test_simulation import random_load


def run_trial(simulation, rng, depth, burst=1, bad=(), size=16):
    """A random load in which each request has one of some adapters, or none."""
    load = list(random_load(rng, size))
    longest = max(len(prompt) for _, prompt, _, _ in load)
    least, num_slots = -(-longest // size), rng.choice((1, 2, 4))
    sim = simulation(
        block_size=size,
        num_blocks=rng.choice((least, least + 2, 20 * least)),
        max_model_len=longest + rng.randint(1, 3 * size),
        max_num_seqs=rng.choice((1, 3, 10, 64)),
        max_num_batched_tokens=rng.choice((1, 8, 200)),
        max_in_flight=depth,
        max_burst=burst,
        adapters=(num_slots, num_slots + rng.choice((0, 0, 3))),
    )
    sim.library.delay, sim.executor.adapters.delay = rng.choice((0, 3)), rng.choice((0, 4))
    sim.executor.adapters.bad = set(bad)
    aborts, step, numbers = [], 0, rng.choice((2, 6, 30))
    load.reverse()
    while load or sim.engine.has_unfinished:
        while load and load[-1][0] <= step:
            _, prompt, params, abort = load.pop()
            request_id = sim.add(prompt, params, adapter=rng.randint(0, numbers))
            if abort is not None:
                aborts.append((abort, request_id))
        for when, request_id in aborts:
            if when == step:
                sim.abort(request_id)
        sim.step()
        if rng.random() < 0.002:
            sim.engine._recover()
            sim.executor.forget()
        step += 1
        assert step < 50_000, "no progress"
    sim.check()
    return sim


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_equal_the_truth(simulation, depth, seed):
    sim = run_trial(simulation, random.Random(f"adapters {seed}"), depth, 1 + seed % 3)
    assert sim.executor.adapters.num_loads


@pytest.mark.parametrize("seed", range(5))
def test_a_corrupt_adapter_fails_its_own_requests_alone(simulation, depth, seed):
    sim = run_trial(simulation, random.Random(f"bad {seed}"), depth, bad=(1, 2))
    for (request_id, _), (reason, why) in sim.finished.items():
        assert (reason == "error") <= (sim.adapters[request_id] in (1, 2))
        if sim.adapters[request_id] in (1, 2):
            assert reason in ("abort", "error")
            assert why == "no such bytes" or reason == "abort"


def test_200_adapters_through_four_slots(simulation, depth):
    rng = random.Random(depth)
    sim = simulation(adapters=(4, 6), max_num_seqs=16, num_blocks=200, max_in_flight=depth)
    order = [1 + number % 200 for number in range(400)]
    rng.shuffle(order)
    ids = [sim.add(prompt_of(20, first), greedy(6), adapter=first) for first in order]
    for request_id in rng.sample(ids, 40):
        sim.steps(3)
        sim.abort(request_id)
    sim.run()
    assert sum(reason != "abort" for reason, _ in sim.finished.values()) >= 300
    assert sim.executor.adapters.num_loads >= 196


def test_adapters_share_no_block_and_do_not_hit_the_base(simulation, depth):
    sim = simulation(adapters=(2, 2), max_in_flight=depth)

    def hits(adapter):
        before = sim.engine.metrics.cache_hit_tokens
        sim.add(prompt_of(70), greedy(2), adapter=adapter)
        sim.run()
        return sim.engine.metrics.cache_hit_tokens - before

    assert [hits(adapter) for adapter in (0, 1, 2, 3, 0, 1, 2, 3)] == [0] * 4 + [64] * 4
    sim.engine.reset_prefix_cache()
    assert [hits(adapter) for adapter in (0, 3)] == [0, 0]


def test_completions_of_one_request_share_its_adapter(simulation, depth):
    sim = simulation(adapters=(1, 1), max_in_flight=depth)
    params = SamplingParams(n=4, max_tokens=9, ignore_eos=True, seed=3)
    sim.add(prompt_of(60), params, adapter=1)
    sim.add(prompt_of(60), params, adapter=2)
    sim.run()
    assert sim.executor.adapters.num_loads == 2


def test_rows_decode_in_every_step_while_an_adapter_is_read(simulation, depth):
    """Neither the library nor the fetch of a rank stops a row that runs."""
    sim = simulation(adapters=(2, 2), max_in_flight=depth)
    sim.library.delay, sim.executor.adapters.delay = 5, 7
    first = sim.add(prompt_of(10), greedy(60))
    sim.steps(3 + depth)
    second = sim.add(prompt_of(10), greedy(5), adapter=1)
    for _ in range(12):
        count = len(sim.tokens[first, 0])
        sim.step()
        assert len(sim.tokens[first, 0]) == count + 1
        assert not sim.tokens[second, 0]
    sim.run()


def test_the_copy_of_an_adapter_and_its_first_prompt_are_not_in_one_step(simulation, depth):
    sim = simulation(adapters=(1, 2), max_in_flight=depth)
    batches, submit = [], sim.executor.submit
    sim.executor.submit = lambda batch: (batches.append(batch), submit(batch))[1]

    def steps_from_load_to_use():
        load, first = (
            next(number for number, batch in enumerate(batches) if found(batch))
            for found in (
                lambda batch: batch.loads,
                lambda batch: any(each.adapter == 0 for each in batch.admissions),
            )
        )
        batches.clear()
        return first - load

    sim.add(prompt_of(10), greedy(5), adapter=1)
    sim.run()
    assert steps_from_load_to_use() == 0  # nothing else runs
    sim.add(prompt_of(10), greedy(60))
    sim.steps(3 + depth)
    sim.add(prompt_of(10), greedy(5), adapter=2)
    sim.run()
    assert steps_from_load_to_use() == 1


def test_the_least_recently_used_adapter_makes_room(simulation):
    sim = simulation(adapters=(2, 2), max_in_flight=0)
    loads = []
    for adapter in (1, 2, 1, 3, 1, 2):
        before = sim.executor.adapters.num_loads
        sim.add(prompt_of(5), greedy(2), adapter=adapter)
        sim.run()
        loads.append(sim.executor.adapters.num_loads - before)
    assert loads == [1, 1, 0, 1, 0, 1]


def test_a_request_is_passed_by_so_many_and_no_more(simulation):
    """One slot is kept busy by requests of one adapter; the other adapter's request comes in."""
    sim = simulation(adapters=(1, 2), max_num_seqs=6, num_blocks=400, max_in_flight=1)
    for _ in range(2):
        sim.add(prompt_of(5), greedy(40), adapter=1)
    sim.steps(4)
    late = sim.add(prompt_of(5), greedy(2), adapter=2)
    later = []
    while (late, 0) not in sim.finished:
        later.append(sim.add(prompt_of(5), greedy(3), adapter=1))
        later.append(sim.add(prompt_of(5), greedy(3)))
        sim.step()
        assert len(later) < 3000, "it waits for ever"
    passed = [request_id for request_id in later if (request_id, 0) in sim.finished]
    by_adapter = [request_id for request_id in passed if sim.adapters[request_id]]
    assert len(by_adapter) <= MAX_PASSED + 4, "those before it waited for a slot alone"
    assert len(passed) > len(by_adapter), "requests of the base alone may always pass"
    assert len(by_adapter) >= MAX_PASSED - 4
    sim.run()
