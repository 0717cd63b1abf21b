"""Several completions of one prompt: shared blocks, own draws, own ends."""

import pytest
from nv_engine.params import SamplingParams
from simulated_engine import greedy, outputs, prompt_of


@pytest.mark.parametrize("length", [2, 15, 16, 17, 31, 33, 48, 49, 60])
@pytest.mark.parametrize("caching", [True, False])
def test_n_completions_share_the_prompt(simulation, depth, length, caching):
    """The prompt is computed once, but for its last token, from which each draws its own first."""
    sim = simulation(
        max_in_flight=depth, enable_prefix_caching=caching, max_num_batched_tokens=20, max_burst=3
    )
    sim.add(prompt_of(length), SamplingParams(n=4, max_tokens=20, ignore_eos=True, seed=9))
    sim.add(prompt_of(40, 1), greedy(3))
    held = []
    while sim.engine.has_unfinished:
        sim.step()
        metrics = sim.engine.metrics
        held.append(metrics.num_blocks - metrics.num_free_blocks)
    sim.check()
    assert len(set(outputs(sim))) == 5  # the draws differ by index
    assert metrics.num_prefill_tokens == length + 3 + 40
    num_shared = (length - 1) // 16
    num_own = -(-(length + 20) // 16) - num_shared
    assert max(held) <= num_shared + 4 * num_own + 3
    assert sim.executor.num_copies == (3 if (length - 1) % 16 else 0)
    assert metrics.cache_hit_tokens == 0  # a sibling's prompt is not a hit


def test_n_completions_without_slots_for_all_at_once(simulation):
    sim = simulation(max_num_seqs=2)
    sim.add(prompt_of(48), SamplingParams(n=5, max_tokens=20, ignore_eos=True, seed=9))
    sim.run()
    assert len(set(outputs(sim))) == 5
    assert sim.engine.metrics.num_prefill_tokens <= 48 + 4 * 16


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_one_completion_of_n_is_aborted(simulation, depth, num_steps, index):
    """Whether it waits, computes the prompt for its siblings, or has drawn: the others go on."""
    sim = simulation(max_in_flight=depth, max_num_batched_tokens=30)
    request_id = sim.add(prompt_of(50), SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=9))
    sim.steps(num_steps)
    sim.abort(request_id, index)
    sim.run()
    reasons = [sim.finished[request_id, each][0] for each in range(3)]
    assert reasons == ["abort" if each == index else "length" for each in range(3)]
