"""Salts of the prefix cache: equal ones share blocks, and others never do.

The fake device asserts the second for every block that it reads.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nv_engine.params import SamplingParams
from nv_engine.request import EngineRequest
from simulated_engine import greedy, outputs, prompt_of
from test_simulation import run_trial, small_requests


def counters(sim):
    """All that an engine counted, and all that it returned."""
    return sim.engine.metrics, outputs(sim), sim.finished, sim.executor.num_copies


@pytest.mark.parametrize("seed", range(20))
def test_one_salt_for_all_is_as_none(simulation, depth, seed):
    found = []
    for salts in (None,), ("x",):
        sim = run_trial(simulation, random.Random(seed), depth, 1 + seed % 3, 16, salts)
        found.append(counters(sim))
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("seed", range(20))
def test_random_loads_of_several_salts_equal_the_truth(simulation, depth, size, seed):
    salts = (None, "a", "b", "ab", "a" * 256, "é")[: 2 + seed % 5]
    sim = run_trial(simulation, random.Random(seed), depth, 2, size, salts)
    assert sim.engine.metrics.num_requests >= 60


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    requests=small_requests(),
    salts=st.lists(st.sampled_from((None, "a", "b")), min_size=5, max_size=5),
    num_blocks=st.integers(3, 7),
    depth=st.integers(0, 3),
)
def test_small_loads_of_several_salts_equal_the_truth(
    simulation, requests, salts, num_blocks, depth
):
    sim = simulation(num_blocks=num_blocks, max_num_seqs=3, max_in_flight=depth)
    for (prompt, params, num_steps), salt in zip(requests, salts, strict=False):
        sim.add(prompt, params, salt)
        sim.steps(num_steps)
    sim.run()


def hits(sim, salt, length=70):
    """Tokens that one more request finds in the cache."""
    before = sim.engine.metrics.cache_hit_tokens
    sim.add(prompt_of(length), greedy(2), salt)
    sim.run()
    return sim.engine.metrics.cache_hit_tokens - before


def test_a_prefix_is_found_under_its_own_salt_alone(simulation, depth):
    sim = simulation(max_in_flight=depth)
    found = [hits(sim, salt) for salt in (None, "a", "b", None, "a", "b", "c", "None")]
    assert found == [0, 0, 0, 64, 64, 64, 0, 0]


def test_completions_of_one_request_share_its_prompt(simulation, depth):
    sim = simulation(max_in_flight=depth)
    sim.add(prompt_of(60), SamplingParams(n=4, max_tokens=9, ignore_eos=True, seed=3), "a")
    sim.run()
    assert sim.engine.metrics.num_prefill_tokens == 60 + 3


def test_a_preempted_request_keeps_its_salt(simulation, depth):
    sim = simulation(num_blocks=6, max_num_seqs=4, max_in_flight=depth)
    for index in range(4):
        sim.add(prompt_of(14), greedy(60), "ab"[index % 2])
    sim.run()
    assert sim.engine.metrics.num_preemptions


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_request_keeps_its_salt_when_the_device_starts_anew(simulation, depth, num_steps):
    sim = simulation(max_in_flight=depth)
    sim.add(prompt_of(70), greedy(9), "a")
    sim.steps(num_steps)
    sim.engine._recover()
    sim.executor.forget()
    sim.run()
    assert [hits(sim, salt) for salt in (None, "a")] == [0, 64]


@pytest.mark.parametrize("wrong", ["", "a" * 257, b"a", 7, ["a"], "\ud800"])
def test_a_wrong_salt_is_refused(simulation, wrong):
    sim = simulation()
    requests = [EngineRequest([5], greedy(2)), EngineRequest([5], greedy(2), cache_salt=wrong)]
    for call in sim.engine.validate, sim.engine.add:
        with pytest.raises(
            ValueError, match=r"^cache_salt is .* str of 1 to 256 characters.*leave"
        ):
            call(requests[1])
    with pytest.raises(ValueError, match=r"^prompt 1: cache_salt is "):
        sim.engine.add_list(requests)
    sim.check_idle()
    assert sim.engine.metrics.num_requests == 0


def test_an_update_tells_when_its_sequence_was_first_placed(simulation, monkeypatch):
    """Not when it was placed again; and an aborted one that never was has no such time."""
    clock = iter(range(100, 10_000))
    monkeypatch.setattr("nv_engine.scheduling.sequence.time.monotonic", lambda: float(next(clock)))
    sim = simulation(num_blocks=6, max_num_seqs=3, max_in_flight=0)
    for _ in range(5):
        sim.add(prompt_of(14), greedy(60))
    times = {}
    while sim.engine.has_unfinished:
        updates = sim.step().updates
        if not times:
            assert sim.engine.abort(4)[0].scheduled_time is None
        for update in updates:
            times.setdefault(update.request_id, set()).add(update.scheduled_time)
    assert sim.engine.metrics.num_preemptions
    assert all(len(each) == 1 for each in times.values())
    first = [min(times[request_id]) for request_id in range(4)]
    assert first == sorted(first)
    assert len(set(first)) == 4
