"""Ranks without a model: messages in order, failures named, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import rank_workers
import torch
from nv_engine import Engine, EngineConfig, SamplingParams
from nv_engine.batch import Batch, Chunk
from nv_engine.executor.process import ProcessExecutor
from nv_engine.executor.ranked import Patience

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]


@pytest.fixture
def config(checkpoint):
    return EngineConfig(model=str(checkpoint), device="cpu", tensor_parallel_size=2)


def batch_of(token_ids):
    return Batch((Chunk(0, 0, len(token_ids), token_ids, samples=True),))


def test_n47_a_thousand_steps_in_order_a_large_one_and_a_killed_rank(config):
    num_threads = torch.get_num_threads()
    executor = ProcessExecutor(config, rank_workers.Echo)
    assert torch.get_num_threads() == num_threads
    pending = [executor.submit(batch_of((number,))) for number in range(1000)]
    assert [step.result().token_ids for step in pending] == [[[n, n]] for n in range(1000)]
    large = tuple(range(2**20, 2**21))  # five bytes each on the way
    assert executor.submit(batch_of(large)).result().token_ids == [[sum(large)] * 2]

    _, rank = executor.process_ids
    os.kill(rank, signal.SIGINT)  # is the caller's to answer
    assert executor.submit(batch_of((7,))).result().token_ids == [[7, 7]]
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 .*killed by SIGKILL"):
        executor.submit(batch_of((8,))).result()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 .*killed by SIGKILL"):
        executor.submit(batch_of((9,)))
    executor.close()
    executor.close()


def test_a_rank_that_lives_and_does_not_answer_is_given_up(config):
    executor = ProcessExecutor(config, rank_workers.Echo, Patience(silence=1.5))
    executor.submit(batch_of((1,))).result()
    os.kill(executor.process_ids[1], signal.SIGSTOP)
    step = executor.submit(batch_of((2,)))
    with pytest.raises(
        RuntimeError, match=r"rank 1 of 2 \(process \d+\) has not answered for 1.5 s"
    ):
        step.result()
    assert not any(map(is_running, executor.process_ids)), "no card is kept by what waits there"
    executor.close()


def test_a_slow_step_is_waited_for_and_an_endless_one_is_not(config):
    executor = ProcessExecutor(config, rank_workers.sleep, Patience(silence=1.5, step=5))
    assert executor.submit(batch_of((20,))).result().token_ids == [[20, 20]]
    message = r"(?s)a step has not ended for 5 s.*steps run by .*rank 1 of 2 \(process \d+\): 1\n"
    with pytest.raises(RuntimeError, match=message):
        executor.submit(batch_of((1000,))).result()
    executor.close()


def test_a_step_that_fails_on_one_rank_names_it(config):
    executor = ProcessExecutor(config, rank_workers.fail_at_five)
    for number in (1, 2, 3, 4):
        assert executor.submit(batch_of((number,))).result().token_ids == [[number, number]]
    last = executor.submit(batch_of((5,)))
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 .*failed:.*five is right out"):
        last.result()
    with pytest.raises(RuntimeError, match="make a new engine"):
        executor.submit(batch_of((6,)))
    executor.close()


@pytest.mark.parametrize(
    ("make_worker", "error", "message"),
    [
        (
            partial(rank_workers.raise_on, 1, RuntimeError("no luck")),
            RuntimeError,
            r"(?s)rank 1 of 2 .*failed:\nTraceback.*raise error\n.*no luck",
        ),
        (partial(rank_workers.exit_on, 1), RuntimeError, "rank 1 of 2 .*died: exit code 3"),
        (partial(rank_workers.raise_on, 0, ValueError("bad shard")), ValueError, "bad shard"),
        (partial(rank_workers.raise_on, 0, RuntimeError("full")), RuntimeError, "full"),
    ],
    ids=["rank 1 raises", "rank 1 dies", "rank 0 is given a wrong value", "rank 0 raises"],
)
def test_n47_a_rank_that_fails_at_start(config, make_worker, error, message):
    with pytest.raises(error, match=message):
        ProcessExecutor(config, make_worker)


SCRIPT = """
import os, sys
from nv_engine import Engine, EngineConfig, SamplingParams

config = EngineConfig(model=sys.argv[1], device="cpu", tensor_parallel_size=2, max_num_seqs=4)
engine = Engine(config)
engine.add([3, 4, 5], SamplingParams(max_tokens=100, ignore_eos=True))
engine.step()
print(*engine.executor.process_ids, flush=True)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
    ids=["killed", "Ctrl-C"],
)
def test_ranks_end_with_their_caller(checkpoint, tmp_path, ending, code):
    """The script does not guard its main module, and closes nothing."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(checkpoint)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    ranks = [int(word) for word in done.stdout.split()]
    for _ in range(100):
        if not any(map(is_running, ranks)):
            break
        time.sleep(0.1)
    assert not any(map(is_running, ranks))
    assert "Warning" not in done.stderr
    assert done.stderr.count("Traceback") == ("KeyboardInterrupt" in ending)


def is_running(process_id):
    """False for one that has ended, even if nobody has taken note yet."""
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_engine_without_a_reference_ends_its_ranks(config, child_processes):
    before = child_processes()
    engine = Engine(config, ProcessExecutor(config, rank_workers.Echo))
    assert len(child_processes()) == len(before) + 2
    engine.add([1, 2], SamplingParams())
    del engine
    assert child_processes() == before


def test_without_ray_the_error_names_the_extra(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("ray", "ray_rank"):
        monkeypatch.delitem(sys.modules, f"nv_engine.executor.{name}", raising=False)
    config = EngineConfig(model=str(checkpoint), distributed_executor_backend="ray")
    with pytest.raises(ModuleNotFoundError, match=r'pip install "nv-engine\[ray\]"'):
        Engine(config)
