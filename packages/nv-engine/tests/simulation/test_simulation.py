"""Random loads on the fake device equal the sequential truth, whatever the overlap.

24 combinations of depth, burst and block size, 100,800 requests in all.
"""

import random
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nv_engine.mixed import MixedSteps
from nv_engine.params import SamplingParams

NUM_REQUESTS = {16: 6_600, 32: 4_000, 64: 2_000}  # a combination, by block size
REQUESTS_A_TRIAL = 60


def random_params(rng, size, prompt_len):
    to_block_end = size - prompt_len % size
    random_ends = (rng.randint(1, 12), rng.randint(1, 2 * size))
    max_tokens = rng.choice((None, 1, 2, to_block_end, *random_ends))
    return SamplingParams(
        n=rng.choice((1, 1, 1, 1, 2, 3)),
        seed=rng.choice((None, None, rng.randrange(2**64))),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens or 5))),
        ignore_eos=rng.random() < 0.4 and max_tokens is not None,
        stop_token_ids=rng.choice((None, [rng.randrange(29)])),
        logprobs=rng.choice((None, None, None, 0)),
        prompt_logprobs=rng.choice((None, None, None, None, 0)),
    )


def random_load(rng, size):
    """(step of arrival, prompt, params, step of abort or None) of each request."""
    prefixes = [[rng.randrange(29) for _ in range(rng.randint(1, 5 * size // 2))] for _ in range(3)]
    step = 0
    for _ in range(REQUESTS_A_TRIAL):
        step += rng.choice((0, 0, 0, 1, rng.randint(0, 12)))
        prefix = rng.choice(prefixes) if rng.random() < 0.6 else []
        prompt = prefix[: rng.choice((None, rng.randint(0, len(prefix))))] + [
            rng.randrange(29) for _ in range(rng.randint(1, size))
        ]
        abort = step + rng.randint(0, 15) if rng.random() < 0.1 else None
        yield step, prompt, random_params(rng, size, len(prompt)), abort


def next_turns(sim, rng, size, longest):
    """Some of the conversations whose last answer has just come, with a word more each."""
    for (request_id, index), (reason, _) in sim.take_ended():
        prompt = [*sim.requests[request_id][0], *sim.tokens[request_id, index], rng.randrange(29)]
        if reason != "abort" and len(prompt) <= longest and rng.random() < 0.3:
            yield prompt, random_params(rng, size, len(prompt))


def run_trial(simulation, rng, depth, burst, size, salts=(None,)):
    """One load to its end; its requests take `salts` in turn."""
    turns = cycle(salts)
    load = list(random_load(rng, size))
    longest = max(len(prompt) for _, prompt, _, _ in load)
    least = -(-longest // size)
    sim = simulation(
        block_size=size,
        num_blocks=rng.choice((least, least + 1, least + rng.randint(1, 8), 20 * least)),
        max_model_len=longest + rng.randint(1, 3 * size),
        max_num_seqs=rng.choice((1, 2, rng.randint(3, 10), 64)),
        max_num_batched_tokens=rng.choice((1, rng.randint(2, 9), rng.randint(10, 200), 1000)),
        mixed=MixedSteps(longest % 71, 1 + longest % 9) if longest % 2 else None,
        max_in_flight=depth,
        max_burst=burst,
        enable_prefix_caching=rng.random() < 0.8,
    )
    aborts = []
    load.reverse()
    step = 0
    while load or sim.engine.has_unfinished:
        while load and load[-1][0] <= step:
            _, prompt, params, abort = load.pop()
            request_id = sim.add(prompt, params, next(turns))
            if abort is not None:
                aborts.append((abort, request_id, rng.choice((None, 0, 1))))
        for when, request_id, index in aborts:
            if when == step:
                sim.abort(request_id, index)
        sim.step()
        for prompt, params in next_turns(sim, rng, size, longest):
            sim.add(prompt, params, next(turns))
        step += 1
        assert step < 50_000, "no progress"
    sim.check()
    return sim


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("burst", [1, 4])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_random_loads_equal_the_truth(simulation, depth, burst, size):
    rng = random.Random(f"{depth} {burst} {size}")
    num_requests = num_preemptions = num_copies = longest_burst = num_hits = 0
    while num_requests < NUM_REQUESTS[size]:
        sim = run_trial(simulation, rng, depth, burst, size)
        metrics = sim.engine.metrics
        num_requests += metrics.num_requests
        num_preemptions += metrics.num_preemptions
        num_hits += metrics.cache_hit_tokens
        num_copies += sim.executor.num_copies
        longest_burst = max(longest_burst, sim.executor.max_burst)
    assert longest_burst == burst
    assert num_preemptions > num_requests / 250
    assert num_hits > num_requests
    assert num_copies > 0 or size == 16  # a block of 16 is found whole or not at all


@pytest.mark.parametrize("burst", [1, 4])
@pytest.mark.parametrize("depth", [0, 2])
def test_random_loads_in_columns_equal_the_truth(column_simulation, depth, burst):
    rng = random.Random(f"columns {depth} {burst}")
    num_requests = num_tokens = num_columns = 0
    while num_requests < 1_500:
        sim = run_trial(column_simulation, rng, depth, burst, 32)
        num_requests += sim.engine.metrics.num_requests
        num_tokens += sum(map(len, sim.tokens.values()))
        num_columns += sim.num_columns
    assert num_columns > num_tokens / 4, "many tokens come without an update"


@st.composite
def small_requests(draw):
    """A few requests over a vocabulary of two letters, so that prefixes meet."""
    prompt = st.lists(st.integers(3, 4), min_size=1, max_size=35)
    params = st.builds(
        SamplingParams, max_tokens=st.integers(1, 30), ignore_eos=st.booleans(), seed=st.just(1)
    )
    return draw(st.lists(st.tuples(prompt, params, st.integers(0, 5)), min_size=1, max_size=5))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    requests=small_requests(),
    num_blocks=st.integers(3, 7),
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(1, 40),
    depth=st.integers(0, 3),
    burst=st.integers(1, 5),
)
def test_small_loads_equal_the_truth(
    simulation, requests, num_blocks, max_num_seqs, budget, depth, burst
):
    """Hypothesis shrinks what the large loads find."""
    sim = simulation(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_in_flight=depth,
        max_burst=burst,
    )
    for prompt, params, num_steps in requests:
        sim.add(prompt, params)
        sim.steps(num_steps)
    sim.run()
