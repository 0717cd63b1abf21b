"""Limits, memory, cache and fairness, one case each (numbers as in the conformance list)."""

import pytest
from nv_engine.params import SamplingParams
from simulated_engine import greedy, outputs, prompt_of


def test_n15_a_prompt_of_one_less_than_max_model_len_gives_one_token(simulation, depth):
    sim = simulation(max_model_len=64, max_in_flight=depth, max_burst=4)
    sim.add(prompt_of(63), greedy(10))
    sim.run()
    assert len(sim.tokens[0, 0]) == 1
    assert sim.finished[0, 0] == ("length", None)


@pytest.mark.parametrize("length", [64, 65])
def test_n15_longer_prompts_are_refused(simulation, length):
    sim = simulation(max_model_len=64)
    with pytest.raises(ValueError, match=f"{length} tokens and the model's own length is 64"):
        sim.add(prompt_of(length), greedy(1))
    assert not sim.engine.has_unfinished


def test_n16_max_model_len_cuts_max_tokens(simulation, depth):
    sim = simulation(max_model_len=64, max_in_flight=depth)
    sim.add(prompt_of(10), greedy(1000))
    sim.add(prompt_of(10), SamplingParams(max_tokens=None, ignore_eos=True, min_tokens=60))
    sim.run()
    assert [len(tokens) for tokens in outputs(sim)] == [54, 54]
    assert set(sim.finished.values()) == {("length", None)}


def test_n17_a_prompt_larger_than_the_cache_is_refused_and_a_small_one_served(simulation):
    sim = simulation(num_blocks=2)
    sim.add(prompt_of(10), greedy(5))
    with pytest.raises(ValueError, match=r"40 tokens, which takes 3 blocks of 16, .* has 2"):
        sim.add(prompt_of(40), greedy(5))
    assert sim.run().finished == {(0, 0): ("length", None)}


def test_a_sequence_that_fills_the_cache_alone_ends_with_length(simulation, depth):
    sim = simulation(num_blocks=2, max_in_flight=depth, max_burst=4)
    sim.add(prompt_of(10), greedy(100))
    sim.add(prompt_of(32), greedy(100))
    sim.run()
    assert [len(tokens) for tokens in outputs(sim)] == [23, 1]  # 32 in the cache, one drawn last
    ((finish_reason, stop_reason),) = set(sim.finished.values())
    assert finish_reason == "length"
    assert "2 blocks of 16 tokens: raise num_kvcache_blocks" in stop_reason


def test_n19_a_pool_for_two_of_four_gives_the_same_tokens(simulation, depth):
    runs = []
    for num_blocks in (8, 64):
        sim = simulation(num_blocks=num_blocks, max_in_flight=depth, max_num_seqs=4)
        for first in range(4):
            sim.add(prompt_of(14, first), greedy(3 * 16))
        runs.append(outputs(sim.run()))
        assert (sim.engine.metrics.num_preemptions > 0) == (num_blocks == 8)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_n20_a_prompt_of_whole_blocks_leaves_a_token_to_compute(simulation, num_blocks):
    sim = simulation(num_blocks=64)
    for _ in range(2):
        sim.add(prompt_of(16 * num_blocks), greedy(5))
        sim.run()
    first, second = outputs(sim)
    assert first == second
    assert sim.engine.metrics.cache_hit_tokens == 16 * (num_blocks - 1)


@pytest.mark.parametrize("budget", [16, 1000])
def test_n21_equal_prompts_in_one_cold_call(simulation, depth, budget):
    sim = simulation(max_in_flight=depth, max_num_batched_tokens=budget)
    for _ in range(8):
        sim.add(prompt_of(48), greedy(20))
    assert len(set(outputs(sim.run()))) == 1


@pytest.mark.parametrize("size", [16, 64])
def test_n21_a_conversation_goes_on_where_a_block_ends(simulation, depth, size):
    """A completion's last token was drawn and never computed: its block is not found whole."""
    sim = simulation(block_size=size, max_in_flight=depth, max_model_len=8 * size)
    prompt = prompt_of(size + 3)
    for turn in range(4):
        sim.add(prompt, greedy(size - len(prompt) % size))
        sim.run()
        prompt = [*prompt, *sim.tokens[turn, 0], turn]
    assert sim.engine.metrics.cache_hit_tokens == sum(turn * size - 16 for turn in (2, 3, 4))


def test_n25_caching_changes_no_output(simulation, depth):
    runs = []
    for caching in (True, False):
        sim = simulation(max_in_flight=depth, enable_prefix_caching=caching)
        for _ in range(4):
            sim.add(prompt_of(48), greedy(20))
            sim.run()
        runs += outputs(sim)
        assert (sim.engine.metrics.cache_hit_tokens > 0) == caching
    assert len(runs) == 8
    assert len(set(runs)) == 1


@pytest.mark.parametrize("length", [15, 16, 17])
def test_n27_a_sequence_holds_as_many_blocks_as_its_length_needs(simulation, depth, length):
    sim = simulation(max_in_flight=depth)
    sim.add(prompt_of(length), greedy(18))
    while sim.engine.has_unfinished:
        sim.step()
        for row in sim.executor.rows.values():
            assert len(row.table) == -(-row.length // 16)
    sim.check()


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5, 9])
def test_n29_abort_while_waiting_prefilling_or_decoding(simulation, depth, num_steps):
    sim = simulation(max_in_flight=depth, max_num_batched_tokens=16, max_num_seqs=2)
    ids = [sim.add(prompt_of(60, first), greedy(30)) for first in range(4)]
    sim.steps(num_steps)
    for request_id in (*ids[1:], 99):
        sim.abort(request_id)
    sim.run()  # raises if an update comes after the abort
    assert [sim.finished[each, 0][0] for each in ids] == ["length", "abort", "abort", "abort"]


def test_an_abort_while_nothing_is_out_frees_the_blocks_at_once(simulation):
    sim = simulation(max_in_flight=0)
    sim.add(prompt_of(20), greedy(30))
    sim.step()
    sim.abort(0)
    sim.check_idle()


def test_n30_a_running_sequence_gains_a_token_in_every_step(simulation, depth):
    sim = simulation(max_in_flight=depth, max_num_batched_tokens=32)
    sim.add(prompt_of(5), greedy(60))
    sim.steps(depth + 1)
    assert len(sim.tokens[0, 0]) == 1
    for first in range(10):
        sim.add(prompt_of(31, first), greedy(2))
    for num_tokens in range(2, 60):
        sim.step()
        assert len(sim.tokens[0, 0]) == num_tokens
    sim.run()


def test_n30_no_more_sequences_run_than_the_budget_has_tokens(simulation):
    sim = simulation(max_num_batched_tokens=4, max_num_seqs=64)
    for first in range(20):
        sim.add(prompt_of(6, first), greedy(9))
    while sim.engine.has_unfinished:
        sim.step()
        assert sim.engine.metrics.num_running <= 4
    sim.check()


def test_n31_no_more_than_max_num_seqs_hold_a_slot(simulation, depth):
    sim = simulation(max_in_flight=depth, max_num_seqs=2)
    for first in range(8):
        sim.add(prompt_of(20, first), greedy(10))
    while sim.engine.has_unfinished:
        sim.step()
        assert sim.engine.metrics.num_running <= 2
    sim.check()
    assert set(sim.executor.rows) == {0, 1}


def test_overlap_schedules_no_step_past_a_length_limit(simulation, depth):
    sim = simulation(max_in_flight=depth)
    sim.add(prompt_of(5), greedy(7))
    sim.run()
    assert sim.executor.num_batches == 7


def test_a_burst_reads_many_steps_at_once(simulation, depth):
    sim = simulation(max_in_flight=depth, max_burst=8)
    sim.add(prompt_of(5), greedy(21))
    sim.run()
    assert sim.executor.num_batches == 1 + 3  # the prompt, then 8 + 8 + 4
    assert sum(output.num_decode_tokens for output in sim.outputs) == 20


def test_no_burst_while_a_sequence_may_be_admitted(simulation):
    sim = simulation(max_burst=8, max_num_batched_tokens=8, max_in_flight=0)
    sim.add(prompt_of(4), greedy(30))
    sim.step()
    sim.add(prompt_of(40), greedy(1))
    while sim.engine.metrics.num_waiting or not sim.tokens[1, 0]:
        assert sim.step().num_decode_tokens == 1
    assert sim.step().num_decode_tokens == 8
    sim.run()


def test_no_burst_that_would_cost_a_sequence_its_blocks(simulation):
    sim = simulation(num_blocks=3, max_burst=8, max_in_flight=0)
    for first in range(2):
        sim.add(prompt_of(14, first), greedy(20))
    sim.step()
    assert sim.step().num_decode_tokens == 2  # one step of both: a burst of 8 needs four blocks
    assert sim.engine.metrics.num_preemptions == 0
    sim.run()


def test_a_partial_hit_is_copied_and_counted(simulation):
    sim = simulation(block_size=64, num_blocks=8)
    sim.add(prompt_of(50), greedy(1))
    sim.run()
    sim.add(prompt_of(40) + prompt_of(20, 3), greedy(3))
    updates = [update for _ in range(3) for update in sim.step().updates]
    assert sim.executor.num_copies == 1
    assert {update.num_cached_tokens for update in updates} == {32}
    sim.run()


def test_the_source_of_a_partial_hit_does_not_keep_a_lone_sequence_out(simulation):
    sim = simulation(block_size=64, num_blocks=2)
    sim.add(prompt_of(50), greedy(1))
    sim.run()
    sim.add(prompt_of(40) + prompt_of(60, 3), greedy(3))
    sim.run()
    assert sim.executor.num_copies == 1


def test_step_counts_prefill_and_decode_tokens(simulation):
    sim = simulation(max_in_flight=0, max_num_batched_tokens=16)
    sim.add(prompt_of(20), greedy(3))
    steps = [sim.step() for _ in range(4)]
    counts = [(step.num_prefill_tokens, step.num_decode_tokens) for step in steps]
    assert counts == [(16, 0), (4, 0), (0, 1), (0, 1)]
    metrics = sim.engine.metrics
    assert (metrics.num_prefill_tokens, metrics.num_decode_tokens) == (20, 2)
    assert metrics.num_generated_tokens == 3


def test_tokens_after_a_stop_are_not_counted_as_generated(simulation):
    sim = simulation(max_in_flight=3, max_burst=4)
    for first in range(20):
        sim.add(prompt_of(5, first), SamplingParams(max_tokens=50))
    sim.run()
    assert any(reason == "stop" for reason, _ in sim.finished.values())
    assert sim.engine.metrics.num_generated_tokens == sum(map(len, outputs(sim)))
