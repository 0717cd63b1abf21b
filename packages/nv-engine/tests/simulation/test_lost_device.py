"""An error that no CUDA context survives ends each request once, and nothing runs any more."""

import os
import signal

import pytest
from nv_engine.executor.loss import FATAL, DeviceLost, loss_of
from nv_engine.params import SamplingParams
from nv_engine.request import EngineRequest

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
TORCH = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call"
SURVIVED = [
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: out of memory",
    "CUDA error: invalid argument",
    "CUDA error: operation not permitted when stream is capturing",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "a misaligned address of no card",
]


class Broken:
    """Stands for a method from its `at`-th call on: raises, and counts the calls after that."""

    def __init__(self, owner, name, at, error):
        self.call, self.at, self.error = getattr(owner, name), at, error
        self.count = 0
        setattr(owner, name, self)

    def __call__(self, *args):
        self.count += 1
        if self.count >= self.at:
            raise self.error
        return self.call(*args)


def started(simulation, **options):
    sim = simulation(max_num_seqs=2, **options)
    for first in range(4):
        sim.add([first + 2, 7, 9], PARAMS)
    return sim


@pytest.mark.parametrize("where", ["submit", "read"])
@pytest.mark.parametrize(
    "error", [RuntimeError(TORCH.format("misaligned address")), DeviceLost("rank 1 of 2 died")]
)
def test_a_lost_device_ends_every_request_and_refuses_new_ones(simulation, depth, where, error):
    sim = started(simulation, max_in_flight=depth)
    broken = Broken(sim.executor, where, 3, error)
    closed = Broken(sim.executor, "close", 1, AssertionError("the device is touched"))
    sim.steps(3 + (depth if where == "read" else 0))
    ((reason, sentence),) = set(sim.finished.values())
    assert (len(sim.finished), reason) == (4, "error")
    assert str(error).splitlines()[0] in sentence
    assert isinstance(error, DeviceLost) or "make the LLM in a new process" in sentence
    num_calls = broken.count
    for refused in (
        lambda: sim.engine.add(EngineRequest([5], PARAMS)),
        sim.engine.step,
        sim.engine.check_usable,
    ):
        with pytest.raises(RuntimeError) as again:
            refused()
        assert str(again.value) == sentence
    assert not sim.engine.has_unfinished
    assert sim.engine.abort(0) == []
    sim.engine.reset_prefix_cache()
    sim.engine.close()
    assert broken.count == num_calls
    assert closed.count == 0


@pytest.mark.parametrize("text", SURVIVED)
def test_what_a_context_survives_ends_the_step_alone(simulation, text):
    sim = started(simulation)
    submit = sim.executor.submit
    Broken(sim.executor, "submit", 3, RuntimeError(text))
    sim.steps(3)
    assert [reason for reason, _ in sim.finished.values()] == ["error"] * 2
    sim.executor.submit = submit
    sim.executor.forget()
    sim.run()
    assert [reason for reason, _ in sim.finished.values()] == ["error"] * 2 + ["length"] * 2


@pytest.mark.parametrize("name", FATAL)
@pytest.mark.parametrize("form", [TORCH, "Triton Error [CUDA]: {}", "CUDA driver error: {}"])
def test_fatal_errors_are_known_in_each_form(name, form):
    sentence = loss_of(RuntimeError(form.format(name)))
    assert form.format(name).splitlines()[0] in sentence
    assert "\n" not in sentence


def test_an_interrupt_while_requests_end_repeats_no_end(simulation):
    sim = started(simulation)
    Broken(sim.executor, "submit", 3, RuntimeError(TORCH.format("misaligned address")))
    finish = sim.engine._scheduler._finish
    Broken(sim.engine._scheduler, "_finish", 2, KeyboardInterrupt())
    sim.steps(2)
    with pytest.raises(KeyboardInterrupt):
        sim.step()
    sim.engine._scheduler._finish = finish
    sim.steps(1)  # the simulation asserts that nothing ends twice
    assert [reason for reason, _ in sim.finished.values()] == ["error"] * 4


def test_b08_a_fork_neither_runs_nor_closes(simulation):
    sim = started(simulation)
    sim.steps(2)
    closed = Broken(sim.executor, "close", 1, AssertionError("it is the parent's"))
    child = os.fork()
    if not child:
        signal.alarm(60)
        refusals = 0
        for call in (sim.engine.step, lambda: sim.engine.add(EngineRequest([5], PARAMS))):
            try:
                call()
            except RuntimeError as error:
                refusals += "made in another process" in str(error)
        sim.engine.close()
        os._exit(refusals + closed.count)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    sim.run()
