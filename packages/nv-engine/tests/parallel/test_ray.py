"""Ranks on the nodes of a Ray cluster: two nodes of two cores, both on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import rank_workers
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from nv_engine.batch import Batch, Chunk

ray = pytest.importorskip("ray")  # in the package's test group; not on every machine with cards

from nv_engine.executor import ray_actor  # noqa: E402
from nv_engine.executor.ray import RayExecutor  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util import placement_group_table  # noqa: E402

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + (7 * n + 3 * i) % 300 for i in range(n)] for n in (1, 20, 70)]
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:  # so that the actors find `rank_workers`
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        cluster = start_cluster()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def start_cluster():
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    cluster.second = cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    return cluster


@pytest.fixture
def config(cluster, checkpoint):
    options = {"device": "cpu", "kvcache_block_size": 16, "distributed_executor_backend": "ray"}
    return partial(EngineConfig, model=str(checkpoint), max_num_seqs=4, **options)


@pytest.fixture(autouse=True)
def nothing_stays(cluster):
    """Every executor gave its room back."""
    yield
    deadline = time.monotonic() + 10
    while {group["state"] for group in placement_group_table().values()} - {"REMOVED"}:
        assert time.monotonic() < deadline, placement_group_table()
        time.sleep(0.05)


def batch_of(number):
    return Batch((Chunk(0, 0, 1, (number,), samples=True),))


def completions(engine):
    tokens = {engine.add(EngineRequest(prompt, GREEDY)): [] for prompt in PROMPTS}
    while engine.has_unfinished:
        for update in engine.step().updates:
            assert update.finish_reason in (None, "length"), update.stop_reason
            tokens[update.request_id] += update.token_ids
    return list(tokens.values())


def nodes_of(executor):
    """The nodes of the ranks."""
    return {place.split(" on node ")[1] for place in executor.places}


def wait_until_gone(process_ids):
    deadline = time.monotonic() + 10
    while any(map(is_running, process_ids)):
        assert time.monotonic() < deadline, process_ids
        time.sleep(0.05)


def is_running(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_four_ranks_on_two_nodes_answer_as_one(config, checkpoint):
    alone = Engine(EngineConfig(model=str(checkpoint), device="cpu", kvcache_block_size=16))
    expected = completions(alone)
    alone.close()
    engine = Engine(config(tensor_parallel_size=4))
    assert len(nodes_of(engine.executor)) == 2
    assert completions(engine) == expected

    process_ids = engine.executor.process_ids
    request = engine.add(EngineRequest(PROMPTS[0], GREEDY))
    engine.step()
    os.kill(process_ids[3], signal.SIGKILL)
    (update,) = [u for u in steps(engine) if u.finish_reason]
    assert update.request_id == request
    assert update.finish_reason == "error"
    place = rf"rank 3 of 4 (process {process_ids[3]} on node {ray.util.get_node_ip_address()} ("
    assert place in update.stop_reason
    wait_until_gone(process_ids)
    engine.close()


def steps(engine):
    while engine.has_unfinished:
        yield from engine.step().updates


def test_two_ranks_share_a_node_and_answer_in_order(config):
    executor = RayExecutor(config(tensor_parallel_size=2), rank_workers.Echo)
    assert len(nodes_of(executor)) == 1
    pending = [executor.submit(batch_of(number)) for number in range(300)]
    results = [step.result().token_ids for step in pending[::3]]  # the others are dropped unread
    assert results == [[[n, n]] for n in range(0, 300, 3)]
    process_ids = executor.process_ids
    executor.close()
    executor.close()
    wait_until_gone(process_ids)
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(batch_of(1))


def test_a_rank_that_fails_at_start(config):
    make_worker = partial(rank_workers.raise_on, 1, RuntimeError("no luck"))
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 \(process \d+ on node .*no luck"):
        RayExecutor(config(tensor_parallel_size=2), make_worker)


STRANGERS = (b"GET / HTTP/1.1\r\n\r\n", b"", None)
"""The bytes that each sends before it leaves; the last stays and sends nothing."""


def test_strangers_at_a_rank_s_port_are_sent_away(config, monkeypatch):
    strangers, connect = [], ray_actor.Client

    def after_strangers(address):
        for words in STRANGERS:
            strangers.append(socket.create_connection(address))
            if words is not None:
                strangers[-1].sendall(words)
                strangers[-1].close()
        return connect(address)

    monkeypatch.setattr(ray_actor, "Client", after_strangers)
    executor = RayExecutor(config(tensor_parallel_size=2), rank_workers.Echo)
    assert executor.submit(Batch((Chunk(0, 0, 1, (7,), samples=True),))).result().token_ids == [
        [7, 7]
    ]
    executor.close()
    assert len(strangers) == 2 * len(STRANGERS)
    for stranger in strangers:
        stranger.close()


def test_a_wrong_value_is_raised_as_such(config):
    make_worker = partial(rank_workers.raise_on, 0, ValueError("bad shard"))
    with pytest.raises(ValueError, match="bad shard"):
        RayExecutor(config(tensor_parallel_size=1), make_worker)


def test_a_cluster_that_is_too_small(config, monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}])
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 2, and .* has 1 CPUs"):
        RayExecutor(config(tensor_parallel_size=2))


SCRIPT = """
import os, sys
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams

config = EngineConfig(
    model=sys.argv[1], device="cpu", max_num_seqs=4, distributed_executor_backend="ray"
)
engine = Engine(config)
engine.add(EngineRequest([3, 4, 5], SamplingParams(max_tokens=100, ignore_eos=True)))
engine.step()
print(*engine.executor.process_ids, flush=True)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("raise KeyboardInterrupt", 1)],
    ids=["killed", "Ctrl-C"],
)
def test_ranks_end_with_their_caller(cluster, checkpoint, tmp_path, ending, code):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(checkpoint)],
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    wait_until_gone([int(word) for word in done.stdout.split()])


def test_a_node_that_is_lost(config, cluster):
    """Last: the cluster has one node less afterwards."""
    executor = RayExecutor(config(tensor_parallel_size=4), rank_workers.Echo)
    executor.submit(batch_of(1)).result()
    lost = [n for n, place in enumerate(executor.places) if cluster.second.node_id[:8] in place]
    assert len(lost) == 2
    cluster.remove_node(cluster.second, allow_graceful=False)
    message = rf"rank ({lost[0]}|{lost[1]}) of 4 .*{cluster.second.node_id[:8]}\)\) died"
    with pytest.raises(RuntimeError, match=message):
        run_for(10, executor)
    executor.close()
    wait_until_gone(executor.process_ids)


def run_for(seconds, executor):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        executor.submit(batch_of(2)).result()
