"""Prompts that are pooled pass the scheduler as those that are completed, whatever the overlap."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nv_engine.params import SamplingParams
from nv_engine.pooling_params import PoolingParams
from pooled_engine import TASKS, PoolingSimulation
from simulated_engine import prompt_of
from test_simulation import random_load

EMBED, TOKENS = (PoolingParams(task=task) for task in TASKS)
REQUESTS = 300


def run_trial(rng, depth, size, *, reads_whole_prompt):
    load = list(random_load(rng, size))
    longest = max(len(prompt) for _, prompt, _, _ in load)
    least = -(-longest // size)
    sim = PoolingSimulation(
        block_size=size,
        num_blocks=rng.choice((least, least + rng.randint(1, 8), 20 * least)),
        max_model_len=longest,  # the longest fills it
        max_num_seqs=rng.choice((1, rng.randint(2, 10), 64)),
        max_num_batched_tokens=rng.choice((1, rng.randint(2, 9), rng.randint(10, 200), 1000)),
        max_in_flight=depth,
        max_burst=rng.choice((1, 4)),
        reads_whole_prompt=reads_whole_prompt,
        enable_prefix_caching=rng.random() < 0.8,
    )
    aborts, step = [], 0
    load.reverse()
    while load or sim.engine.has_unfinished:
        while load and load[-1][0] <= step:
            _, prompt, _, abort = load.pop()
            params = EMBED if rng.random() < 0.7 else TOKENS
            aborts.append((abort, sim.add(prompt, params, rng.choice((None, None, "a")))))
        for when, request_id in aborts:
            if when == step:
                sim.abort(request_id)
        if rng.random() < 0.01:
            sim.executor.forget()
            sim.engine._recover()
        sim.step()
        step += 1
        assert step < 50_000, "no progress"
    sim.check()
    return sim


@pytest.mark.parametrize("reads_whole_prompt", [False, True])
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_random_loads_equal_the_truth(depth, size, reads_whole_prompt):
    rng = random.Random(f"{depth} {size} {reads_whole_prompt}")
    num_requests, finished, cached = 0, set(), 0
    while num_requests < REQUESTS:
        sim = run_trial(rng, depth, size, reads_whole_prompt=reads_whole_prompt)
        num_requests += len(sim.requests)
        finished |= set(sim.finished.values())
        for request_id, (_, params) in sim.requests.items():
            cached += sim.cached[request_id]
            assert not (sim.cached[request_id] and (reads_whole_prompt or params is TOKENS))
    assert finished == {"stop", "abort"}
    assert (cached > 0) != reads_whole_prompt


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(3, 4), min_size=1, max_size=35),
            st.sampled_from((EMBED, TOKENS)),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=5,
    ),
    num_blocks=st.integers(3, 7),
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(1, 40),
    depth=st.integers(0, 3),
)
def test_small_loads_equal_the_truth(requests, num_blocks, max_num_seqs, budget, depth):
    sim = PoolingSimulation(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_in_flight=depth,
        max_model_len=35,
    )
    for prompt, params, num_steps in requests:
        sim.add(prompt, params)
        sim.steps(num_steps)
    sim.run()


def test_a_prefix_is_found_by_a_later_prompt(depth):
    sim = PoolingSimulation(max_in_flight=depth)
    first = sim.add(prompt_of(40), EMBED)
    sim.run()
    again, of_tokens = sim.add(prompt_of(40), EMBED), sim.add(prompt_of(40), TOKENS)
    sim.run()
    assert [sim.cached[each] for each in (first, again, of_tokens)] == [0, 32, 0]


def test_prompts_start_in_their_order(depth):
    """A list's order is kept: no prompt has more to generate than another."""
    sim = PoolingSimulation(max_in_flight=depth, max_num_seqs=1)
    ids = [sim.add(prompt_of(length), EMBED) for length in (9, 30, 3)]
    sim.run()
    assert list(sim.finished) == ids


def test_a_failed_step_ends_the_prompts_in_it(depth):
    sim = PoolingSimulation(max_in_flight=depth, max_num_seqs=2, max_num_batched_tokens=20)
    for length in (15, 15, 15, 15):
        sim.add(prompt_of(length, first=length), EMBED)
    submit = sim.executor.submit

    def fail(_):
        sim.executor.submit = submit
        sim.executor.forget()
        raise RuntimeError("CUDA out of memory")

    sim.executor.submit = fail
    sim.run()
    assert list(sim.finished.values()).count("error") == 2
    assert list(sim.finished.values()).count("stop") == 2


def test_each_engine_refuses_the_other_s_parameters(simulation):
    pools, draws = PoolingSimulation(), simulation()
    with pytest.raises(ValueError, match=r"this engine pools \(embed, token_embed\).*generate"):
        pools.add([3], SamplingParams())
    with pytest.raises(ValueError, match="generates text and does not pool"):
        PoolingSimulation.add(draws, [3], EMBED)
    for params, sentence in (
        (PoolingParams(task="classify"), "task is 'classify': this model has embed, token_embed"),
        (PoolingParams(), "task is None: this model has"),
        (PoolingParams(task="embed", dimensions=2), "dimensions is 2: it must be from 1 to 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            pools.add([3], params)


def test_a_prompt_may_fill_max_model_len(depth):
    sim = PoolingSimulation(max_model_len=32, num_blocks=2, max_in_flight=depth)
    sim.add(prompt_of(32), EMBED)
    sim.run()
    with pytest.raises(ValueError, match=r"33 tokens and .* 32 .*truncate_prompt_tokens=-1"):
        sim.add(prompt_of(33), EMBED)
