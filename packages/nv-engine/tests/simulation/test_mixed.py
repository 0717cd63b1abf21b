"""Prompts beside rows that decode: in pieces, where the steps that come anyway have room."""

import pytest
from nv_engine.mixed import MixedSteps, mixed_steps
from simulated_engine import greedy, prompt_of

MIXED = MixedSteps(num_tokens=48, least=8)  # 16 tokens beside 1 to 32 rows


def started(simulation, num_tokens, **options):
    """One request that decodes, and may go on for `num_tokens` in all."""
    sim = simulation(max_model_len=4096, num_blocks=600, mixed=MIXED, max_in_flight=0, **options)
    sim.add(prompt_of(40), greedy(num_tokens))
    assert sim.step().num_prefill_tokens == 40  # no row decodes: as many as the budget allows
    return sim


def test_prompts_come_in_pieces_and_no_row_waits(simulation):
    sim = started(simulation, 500)
    for first in (5, 6, 7):  # no prefix in common
        sim.add(prompt_of(100, first), greedy(20))
    sizes = []
    while sim.engine.metrics.num_waiting or sizes[-1]:
        step = sim.step()
        sizes.append(step.num_prefill_tokens)
        assert step.num_decode_tokens >= 1
    assert sizes == [16] * 18 + [12, 0]
    sim.run()
    sim.check_idle()


@pytest.mark.parametrize(("num_tokens", "first"), [(20, 16), (19, 300)])
def test_more_than_the_decoding_that_is_left_has_room_for_comes_at_once(
    simulation, num_tokens, first
):
    """304 tokens have room in 19 steps; the oldest has its first token, and 18 or 19 to go."""
    sim = started(simulation, num_tokens + 1)
    sim.step()
    sim.add(prompt_of(300, 5), greedy(5))
    assert sim.step().num_prefill_tokens == first
    sim.run()
    sim.check_idle()


def test_what_a_running_prompt_has_left_takes_room_as_well(simulation):
    """Either prompt would have room in the oldest's last 18 steps, 288 tokens; not both."""
    sim = started(simulation, 21)
    sim.step()
    sim.add(prompt_of(200, 5), greedy(5))
    assert sim.step().num_prefill_tokens == 16
    sim.add(prompt_of(150, 6), greedy(5))
    assert sim.step().num_prefill_tokens == 184 + 150
    sim.run()
    sim.check_idle()


def test_the_oldest_row_bounds_the_steps_that_come_anyway(simulation):
    sim = started(simulation, 500)
    sim.add(prompt_of(10, 5), greedy(4))
    sim.step()
    sim.add(prompt_of(100, 6), greedy(5))  # more than the newer row's steps have room for
    step = sim.step()
    assert (step.num_prefill_tokens, step.num_decode_tokens) == (16, 2)
    sim.run()
    sim.check_idle()


def test_a_small_budget_still_bounds_a_step(simulation):
    sim = started(simulation, 400, max_num_batched_tokens=40)
    sim.add(prompt_of(60, 5), greedy(5))
    sim.engine._scheduler._max_num_tokens = 10
    assert sim.step().num_prefill_tokens == 9


def test_waiting_tokens_are_counted_when_a_request_leaves(simulation):
    sim = simulation(max_num_seqs=1, max_in_flight=0, mixed=MIXED)
    for length in (5, 7, 11, 13):
        sim.add(prompt_of(length), greedy(30))
    waiting = sim.engine._scheduler._waiting
    sim.step()
    assert waiting.num_tokens == 31
    sim.abort(1)
    sim.abort(0)
    sim.step()
    assert waiting.num_tokens == 13
    sim.run()
    sim.check_idle()


def test_large_layers_have_it_and_small_ones_do_not():
    assert mixed_steps(2 * 4096 * (80 * 128 + 3 * 12288)) == MixedSteps()  # Qwen3-8B
    assert mixed_steps(2 * 1024 * (48 * 128 + 3 * 3072)) is None  # Qwen3-0.6B
