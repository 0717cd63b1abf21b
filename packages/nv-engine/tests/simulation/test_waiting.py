"""Waiting sequences: counted until they leave, however they do, and forgotten then."""

import random

import pytest
from nv_engine.mixed import MixedSteps
from nv_engine.params import SamplingParams
from nv_engine.scheduling.policy import longest_first
from nv_engine.scheduling.sequence import NO_SLOT, Sequence
from nv_engine.scheduling.waiting import WaitingQueue
from simulated_engine import greedy, prompt_of


def check_counts(sim):
    """Hold the queue's books against all sequences that have not ended and have no slot."""
    scheduler = sim.engine._scheduler
    queue = scheduler._waiting
    waiting = [each for each in scheduler._requests.all() if each.slot == NO_SLOT]
    held = [each for siblings in queue._held.values() for each in siblings]
    queued = [each for each in waiting if each not in held]
    assert len(waiting) == len(queue) == len(queued) + len(held)
    assert queue.num_tokens == sum(len(each.token_ids) for each in queued)
    assert len(queue._heap) <= 2 * len(queued), "the finished outnumber the others"


def test_one_that_ended_while_waiting_does_not_count_for_mixed_steps(simulation):
    mixed = MixedSteps(num_tokens=48, least=8)  # 16 tokens of prompts beside 1 to 32 rows
    sim = simulation(
        max_num_seqs=2, num_blocks=600, max_model_len=4096, mixed=mixed, max_in_flight=0
    )
    sim.add(prompt_of(40), greedy(200))
    sim.step()
    sim.add(prompt_of(200, 5), greedy(20))
    assert sim.step().num_prefill_tokens == 16
    for _ in range(40):
        sim.abort(sim.add(prompt_of(300), greedy(5)))
    assert sim.step().num_prefill_tokens == 16
    sim.run()


@pytest.mark.parametrize("num_waiting", [0, 3])
def test_one_that_ended_while_waiting_is_forgotten(simulation, num_waiting):
    sim = simulation(max_num_seqs=1, max_in_flight=0)
    sim.add(prompt_of(5), greedy(50))
    sim.step()
    for first in range(num_waiting):
        sim.add(prompt_of(9, first), greedy(2))
    for _ in range(2000):
        sim.abort(sim.add(prompt_of(7), greedy(2)))
        check_counts(sim)
    assert [len(sim.tokens[each, 0]) for each in range(1 + num_waiting)] == [1] + [0] * num_waiting
    sim.run()
    assert [key for key, (reason, _) in sim.finished.items() if reason == "length"] == [
        (request_id, 0) for request_id in range(1 + num_waiting)
    ]


def test_a_sibling_that_ended_while_held_is_forgotten_and_the_others_stay(simulation):
    sim = simulation(max_num_seqs=4, max_in_flight=0, max_num_batched_tokens=16)
    sim.add(prompt_of(40), SamplingParams(n=3, max_tokens=3, ignore_eos=True))
    sim.step()
    sim.abort(0, 1)
    check_counts(sim)
    assert sim.engine.metrics.num_waiting == 1
    sim.run()
    # 40 of the first, and the prompt's last token of the third, which shares the others.
    assert sim.engine.metrics.num_prefill_tokens == 41
    assert {key: reason for key, (reason, _) in sim.finished.items()} == {
        (0, 0): "length",
        (0, 1): "abort",
        (0, 2): "length",
    }


@pytest.mark.parametrize("seed", range(12))
def test_the_count_is_right_after_any_history(simulation, depth, seed):
    rng = random.Random(seed)
    sim = simulation(
        num_blocks=rng.choice((6, 9, 30)),
        max_num_seqs=rng.choice((1, 3, 8)),
        max_num_batched_tokens=rng.choice((10, 40, 1000)),
        max_in_flight=depth,
    )
    for _ in range(400):
        kind = rng.choices(("add", "abort", "step", "fail"), (4, 3, 8, 0.2))[0]
        if kind == "add":
            kinds = {"n": rng.choice((1, 1, 2, 3)), "max_tokens": rng.randint(1, 40)}
            sim.add(prompt_of(rng.randint(1, 50), rng.randrange(29)), SamplingParams(**kinds))
        elif kind == "abort" and sim.requests:
            newest = max(sim.requests)
            sim.abort(rng.randint(max(newest - 9, 0), newest), rng.choice((None, 0, 1, 2)))
        elif kind == "step":
            sim.step()
        elif kind == "fail":
            sim.engine._recover(rng.choice((None, "RuntimeError: lost")))
            sim.executor.forget()
        check_counts(sim)
    sim.run()


def test_one_that_was_preempted_leaves_with_all_its_tokens(simulation):
    sim = simulation(num_blocks=6, max_num_seqs=4, max_in_flight=0)
    ids = [sim.add(prompt_of(14, first), greedy(60)) for first in range(4)]
    while not sim.engine.metrics.num_preemptions:
        sim.step()
        check_counts(sim)
    queue = sim.engine._scheduler._waiting
    assert queue.num_tokens > 14
    sim.abort(ids[-1])
    check_counts(sim)
    assert not queue.num_tokens
    sim.run()


def test_one_that_was_preempted_comes_first_whatever_the_policy():
    queue = WaitingQueue(longest_first)
    for number, (limit, num_cached) in enumerate([(30, -1), (20, 0), (90, -1)]):
        sequence = Sequence(number, 0, [5] * 10, greedy(limit), seed=0, limit=limit)
        sequence.arrive(number)
        sequence.num_cached_tokens = num_cached  # from 0: it ran before
        queue.push(sequence)
    order = []
    while (first := queue.first()) is not None:
        order.append(first.number)
        queue.pop()
    assert order == [1, 2, 0]
