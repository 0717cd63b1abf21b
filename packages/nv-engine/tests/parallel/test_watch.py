"""RankWatch, whose ranks are the other ends of two pipes."""

import time
from multiprocessing import Pipe

import pytest
from nv_engine.executor.member import Report
from nv_engine.executor.watch import RankWatch


class PipedRank:
    """A rank that sends what the test asks for, and is gone once its end is closed."""

    process_id = 1
    place = "a pipe"

    def __init__(self, number):
        self.number = number
        self.connection, self.says = Pipe()

    def kill(self):
        self.says.close()

    def wait(self, seconds):
        pass

    def reap(self):
        pass

    def ending(self):
        return "exit code 0"


@pytest.fixture
def ranks():
    return [PipedRank(0), PipedRank(1)]


@pytest.fixture
def watch(ranks):
    watch = RankWatch(ranks, 2)
    yield watch
    watch.stop(0)


@pytest.mark.parametrize("stage", ["up", "ready"])
def test_n47_a_wrong_value_is_raised_as_what_it_is_at_every_stage_of_the_start(ranks, watch, stage):
    ranks[0].says.send(Report("up"))
    if stage == "ready":
        ranks[1].says.send(Report("up"))
    ranks[0].says.send(Report("failed", "its traceback", time.time(), ValueError("bad shard")))
    ranks[0].says.close()
    with pytest.raises(ValueError, match=r"^bad shard$") as caught:
        _until(watch, stage)
    assert "rank 0 of 2 (a pipe) failed:\nits traceback" in str(caught.value.__cause__)


def test_a_rank_that_is_ready_is_up(ranks, watch):
    ranks[0].says.send(Report("up"))
    ranks[0].says.send(Report("ready", facts="facts"))
    ranks[1].says.send(Report("up"))
    _until(watch, "up")
    assert watch.late("ready") == "rank 1 of 2 (a pipe)"
    ranks[1].says.send(Report("ready"))
    _until(watch, "ready")
    assert watch.facts == "facts"


def _until(watch, stage):
    deadline = time.monotonic() + 20
    while not watch.reached(stage, timeout=0.05):
        assert time.monotonic() < deadline, f"{watch.late(stage)} has not reached {stage}"
