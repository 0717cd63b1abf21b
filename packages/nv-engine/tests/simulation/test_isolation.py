"""A fault of one request, or an interrupt, costs the others nothing."""

import numpy as np
import pytest
from nv_engine.engine import Engine
from nv_engine.grammar import StructuredOutputsParams
from nv_engine.params import SamplingParams
from nv_engine.request import EngineRequest
from nv_engine.scheduling.policy import longest_first


class Break:
    """Raises at the k-th call of an object's method, before or after its work, once or for good."""

    def __init__(self, owner, name, at, error, *, late=False, forever=False):
        self.call, self.at, self.error = getattr(owner, name), at, error
        self.late, self.forever = late, forever
        self.count = 0
        setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        self.count += 1
        breaks = self.count == self.at or (self.forever and self.count > self.at)
        if breaks and not self.late:
            raise self.error
        result = self.call(*args, **kwargs)
        if breaks:
            raise self.error
        return result


def params(num_tokens=20):
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def prompt_of(length, first=2):
    return [(first + 7 * position) % 29 for position in range(length)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([5, 29], r"token id 29: the vocabulary is 0 \.\. 28"),
        ([5, -1], "token id -1"),
        ([5, 1.5], "integer token ids"),
        ("text", "integer token ids"),
    ],
)
def test_n06_n13_bad_prompts_are_refused(simulation, prompt, message):
    sim = simulation()
    with pytest.raises(ValueError, match=message):
        sim.engine.add(EngineRequest(prompt, params()))
    assert not sim.engine.has_unfinished


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {29: 1.0}},
        {"allowed_token_ids": [3, 29]},
        {"stop_token_ids": [29]},
        {"bad_words_token_ids": [[4], [3, 29]]},
    ],
)
def test_n13_ids_outside_the_vocabulary_in_the_parameters(simulation, more):
    sim = simulation()
    with pytest.raises(ValueError, match=f"{next(iter(more))} has token id 29"):
        sim.engine.add(EngineRequest([5], SamplingParams(**more)))
    assert not sim.engine.has_unfinished


def test_a_grammar_that_is_only_named_is_refused(simulation):
    sim = simulation()
    asked = StructuredOutputsParams(choice=["a"])
    with pytest.raises(ValueError, match="structured_outputs"):
        sim.engine.add(EngineRequest([5], SamplingParams(structured_outputs=asked)))
    sim.check_idle()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": ["x"]}, "bad_words_token_ids"),
        ({"allowed_token_ids": [3], "bad_words_token_ids": [[3]]}, "allow another token"),
        ({"allowed_token_ids": [0, 1], "min_tokens": 1}, "allow another token"),
    ],
)
def test_parameters_that_leave_nothing_to_draw_or_need_text(simulation, fields, message):
    with pytest.raises(ValueError, match=message):
        simulation().engine.add(EngineRequest([5], SamplingParams(**fields)))


def test_n07_a_refused_request_leaves_no_trace(simulation):
    sim = simulation()
    with pytest.raises(ValueError, match="empty"):
        sim.engine.add(EngineRequest([], params()))
    sim.check_idle()
    sim.add(prompt_of(3), params())
    sim.run()
    assert list(sim.finished) == [(0, 0)]


def test_an_id_in_use_is_refused_and_a_free_one_taken(simulation):
    sim = simulation()
    assert sim.engine.add(EngineRequest([5], params(1), request_id=40)) == 40
    with pytest.raises(ValueError, match="request_id is 40"):
        sim.engine.add(EngineRequest([5], params(1), request_id=40))
    assert sim.engine.add(EngineRequest([5], params(1))) == 41


@pytest.mark.parametrize("wrong", [-1, 1.5, "x", True, float("nan"), 2**63, [3]])
def test_an_id_that_is_no_integer_from_0_is_refused(simulation, wrong):
    sim = simulation()
    with pytest.raises(
        ValueError, match=r"request_id is .*: it must be an integer from 0 to \d+ .*leave it out"
    ) as error:
        sim.engine.add(EngineRequest([5], params(1), request_id=wrong))
    assert repr(wrong) in str(error.value)
    sim.check_idle()
    assert sim.engine.metrics.num_requests == 0
    assert sim.engine.add(EngineRequest([5], params(1))) == 0


@pytest.mark.parametrize("given", [0, 2**63 - 1, np.int64(7)])
def test_an_id_is_taken_as_a_plain_int(simulation, given):
    engine = simulation().engine
    request_id = engine.add(EngineRequest([5], params(1), request_id=given))
    assert type(request_id) is int
    assert request_id == given
    assert [update.request_id for update in engine.abort(given)] == [given]


SCHEDULING = ("schedule", "commit", "_decode", "_settle", "_finish", "_make_room")
RUNNING = ("place", "reserve", "release")
BLOCKS = ("match", "extend", "publish", "copied", "free")
INTERRUPTS = [
    (where, late)
    for where in ("submit", "read", *SCHEDULING, *RUNNING, *BLOCKS)
    for late in (False, True)
    if (where, late) != ("commit", True)  # what the step brought is on its way to the caller then
]


def owner_of(sim, name):
    scheduler = sim.engine._scheduler
    owners = {
        scheduler: SCHEDULING,
        scheduler._running: RUNNING,
        scheduler.blocks: BLOCKS,
        sim.executor: ("submit", "read"),
    }
    return next(owner for owner, names in owners.items() if name in names)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize(("where", "late"), INTERRUPTS)
def test_n08_n11_an_interrupt_loses_no_request(simulation, depth, where, at, late):
    sim = simulation(max_in_flight=depth, num_blocks=9)
    engine = sim.engine
    mine = [sim.add(prompt_of(20, first), params()) for first in range(2)]
    queued = [sim.add(prompt_of(30, first), params()) for first in range(2, 6)]
    Break(owner_of(sim, where), where, at, KeyboardInterrupt(), late=late)
    with pytest.raises(KeyboardInterrupt):
        sim.steps(100)
    sim.executor.forget()
    for request_id in mine:
        sim.abort(request_id)
    assert engine.metrics.num_free_blocks == 9
    later = sim.add(prompt_of(20), params())
    sim.run()
    for request_id in (*queued, later):
        assert sim.finished[request_id, 0] == ("length", None)
    # Late in the run, one of them may have ended before the interrupt.
    assert {sim.finished[request_id, 0][0] for request_id in mine} <= {"abort", "length"}


@pytest.mark.parametrize("where", ["submit", "read"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_failed_step_ends_its_requests_with_the_reason(simulation, depth, where):
    sim = simulation(max_in_flight=depth, max_num_seqs=2)
    for first in range(6):
        sim.add(prompt_of(20, first), params())
    Break(sim.executor, where, 4, RuntimeError("device on fire"))
    sim.steps(4 + (depth if where == "read" else 0))
    failed = {key: value for key, value in sim.finished.items() if value[0] == "error"}
    assert failed == dict.fromkeys([(0, 0), (1, 0)], ("error", "RuntimeError: device on fire"))
    sim.executor.forget()
    sim.run()
    assert [sim.finished[each, 0][0] for each in range(2, 6)] == ["length"] * 4


def test_a_device_that_stays_broken_ends_every_request(simulation):
    sim = simulation(max_num_seqs=2)
    for first in range(6):
        sim.add(prompt_of(20, first), params())
    Break(sim.executor, "submit", 3, RuntimeError("device lost"), forever=True)
    sim.steps(20)
    assert set(sim.finished.values()) == {("error", "RuntimeError: device lost")}
    assert not sim.engine.has_unfinished
    sim.check_idle()


@pytest.mark.parametrize("fault", [AssertionError, NotImplementedError, RecursionError])
def test_any_other_error_is_raised_and_the_engine_usable(simulation, fault):
    sim = simulation()
    sim.add(prompt_of(20), params())
    Break(sim.executor, "submit", 3, fault("a fault of ours"))
    with pytest.raises(fault, match="a fault of ours"):
        sim.steps(3)
    sim.executor.forget()
    sim.run()
    assert sim.finished[0, 0] == ("length", None)


def test_reset_prefix_cache_while_running(simulation):
    sim = simulation(max_in_flight=1)
    for first in range(4):
        sim.add(prompt_of(40, first), params())
    sim.steps(5)
    sim.engine.reset_prefix_cache()
    sim.add(prompt_of(40, 0), params())
    sim.run()
    assert sim.engine.metrics.cache_hit_tokens == 0


def test_a_closed_engine_takes_no_requests(simulation):
    sim = simulation()
    sim.engine.close()
    sim.engine.close()
    with pytest.raises(ValueError, match="closed"):
        sim.engine.add(EngineRequest([5], params()))


def test_the_policy_orders_admission(simulation):
    sim = simulation(max_num_seqs=1)
    sim.engine = Engine(sim.engine.config, sim.executor, policy=longest_first)
    for num_tokens in (3, 9, 6):
        sim.add(prompt_of(5), params(num_tokens))
    sim.run()
    assert [request_id for request_id, _ in sim.finished] == [1, 2, 0]
