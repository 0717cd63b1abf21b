"""Ranks without a model: messages in order, failures named, every process ended."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import rank_workers
import torch
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from nv_engine.batch import Batch, Chunk
from nv_engine.executor import process
from nv_engine.executor.parallel import Patience
from nv_engine.executor.process import ProcessExecutor

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
        (partial(rank_workers.raise_odd, 1), RuntimeError, "(?s)rank 1 of 2 .*Odd: odd"),
        (partial(rank_workers.raise_unknown, 1), RuntimeError, "(?s)rank 1 .*Lost: no such class"),
    ],
    ids=[
        "rank 1 raises",
        "rank 1 dies",
        "rank 0 is given a wrong value",
        "rank 0 raises",
        "what cannot be pickled",
        "what no other process can read",
    ],
)
def test_n47_a_rank_that_fails_at_start(config, make_worker, error, message):
    with pytest.raises(error, match=message):
        ProcessExecutor(config, make_worker)


def test_a_rank_that_is_stopped_while_it_loads(config):
    patience = Patience(load=1.5)
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 .* has not answered for 1.5 s"):
        ProcessExecutor(config, partial(rank_workers.stop_on, 1), patience)


def test_a_rank_that_does_not_come_up(config, monkeypatch):
    monkeypatch.setattr(process, "START_SECONDS", 0.0)  # importing torch takes longer
    with pytest.raises(RuntimeError, match=r"rank 0 of 2 .* and rank 1 of 2 .* has not come up in"):
        ProcessExecutor(config, rank_workers.Echo)


def test_what_the_ranks_import_is_what_their_caller_imports(config, monkeypatch, tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    ProcessExecutor(config, rank_workers.Echo).close()


def test_an_engine_whose_rank_is_stuck_closes(config):
    executor = ProcessExecutor(config, rank_workers.sleep)
    executor.submit(batch_of((3000,)))
    begin = time.monotonic()
    executor.close()
    assert time.monotonic() - begin < 10
    assert not any(map(is_running, executor.process_ids))


def test_a_fork_of_the_caller_leaves_the_ranks_alone(config):
    executor = ProcessExecutor(config, rank_workers.Echo)
    child = os.fork()
    if child == 0:
        executor.close()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert executor.submit(batch_of((7,))).result().token_ids == [[7, 7]]
    executor.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3, "num_attention_heads": 6}, "num_key_value_heads = 3"),
        ({"intermediate_size": 63}, "intermediate_size = 63"),
    ],
)
def test_a_model_that_ranks_cannot_share_starts_none(
    checkpoint, tmp_path, child_processes, fields, message
):
    values = json.loads((checkpoint / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(values))
    before = child_processes()
    config = EngineConfig(model=str(tmp_path), device="cpu", tensor_parallel_size=2)
    with pytest.raises(ValueError, match=message):
        ProcessExecutor(config, partial(rank_workers.raise_on, 0, RuntimeError("it was started")))
    assert child_processes() == before


def test_ranks_that_would_share_a_card_are_not_started(config, monkeypatch):
    one = torch.device("cuda", 0)
    monkeypatch.setattr(process, "choose_device", lambda name, rank: one)
    with pytest.raises(ValueError, match="each rank has a card of its own"):
        ProcessExecutor(config, partial(rank_workers.raise_on, 0, RuntimeError("it was started")))


SCRIPT = """
import os, sys
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams

config = EngineConfig(model=sys.argv[1], device="cpu", tensor_parallel_size=2, max_num_seqs=4)
engine = Engine(config)
engine.add(EngineRequest([3, 4, 5], SamplingParams(max_tokens=100, ignore_eos=True)))
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
    """False for one that has ended, even if its parent has not waited for it yet."""
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_engine_without_a_reference_ends_its_ranks(config, child_processes):
    before = child_processes()
    engine = Engine(config, ProcessExecutor(config, rank_workers.Echo))
    assert len(child_processes()) == len(before) + 2
    engine.add(EngineRequest([1, 2], SamplingParams()))
    del engine
    assert child_processes() == before


def test_without_ray_the_error_names_the_extra(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("ray", "ray_actor"):
        monkeypatch.delitem(sys.modules, f"nv_engine.executor.{name}", raising=False)
    config = EngineConfig(model=str(checkpoint), distributed_executor_backend="ray")
    with pytest.raises(ModuleNotFoundError, match=r'pip install "nv-engine\[ray\]"'):
        Engine(config)
