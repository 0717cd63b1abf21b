"""RayExecutor: ranks on the nodes of a Ray cluster, each an actor that holds one shard.

Owns their places and their start. Ray finds the nodes and ends the processes; batches, results and
signs of life travel over connections of our own, as between processes of one host: they tell of a
dead rank at once, and keep their order.
"""

import os
import secrets
import socket
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, NamedTuple

from nv_engine.batch import Batch, StepResult
from nv_engine.config import EngineConfig
from nv_engine.device import distributed
from nv_engine.device.worker import Worker
from nv_engine.executor.rank import MakeWorker, RankSpec, serve
from nv_engine.executor.ranked import Patience, RankedExecutor, RankZero, located
from nv_engine.executor.ranks import POLL_SECONDS, Ranks

try:
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'distributed_executor_backend="ray" needs Ray: pip install "nv-engine[ray]"',
        name=error.name,
    ) from error

PLACE_SECONDS = 60.0
"""For the cluster to have room for all ranks at once."""
START_SECONDS = 120.0
"""For a process to start and import torch."""
ENDING_SECONDS = 1.0
KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 4}
"""A machine that vanished without a word is noticed after 2 + 4 x 1 seconds..."""
UNSENT_MILLISECONDS = 6000
"""... or after this time if something was sent to it."""

Actor = Any
"""A handle that Ray made; Ray's types are not checked, for it is an extra."""


class Place(NamedTuple):
    """Where a rank is."""

    host: str
    node_id: str
    process_id: int
    port: int
    """Of its connection."""
    store_port: int | None
    """Of the ranks' meeting place, which rank 0 holds."""


class RayExecutor(RankedExecutor):
    """Runs batches on `tensor_parallel_size` ranks, wherever in a Ray cluster they find room.

    All ranks are on one node if a node has that many cards (or cores, for a CPU), else on as few as
    Ray can manage. The caller needs no card. The model's folder must be at the same path on every
    node, and this package be installed there.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_worker: MakeWorker = Worker,
        patience: Patience | None = None,
    ) -> None:
        """Place the ranks and load the model; connects to Ray as `ray.init()` does, if need be.

        Args:
            config: the options.
            make_worker: makes a rank's worker, in the rank's process, which imports it by name.
            patience: when a rank that lives, and does not answer, is given up.

        Raises:
            ValueError: the ranks do not divide the model, or the cluster is too small for them.
            RuntimeError: a rank failed or died, and the message names rank and node; or the cluster
                had no room in time.
        """
        config = located(config)
        if not ray.is_initialized():
            ray.init()
        resource = _resource(config.device)
        config = replace(config, device="cuda:0" if resource == "GPU" else "cpu")
        group = _reserve(config.tensor_parallel_size, resource)
        ranks = Ranks((), config.tensor_parallel_size)
        try:
            ranks = Ranks(_seated(config, make_worker, group, resource), ranks.size)
            _await_load(ranks)
        except BaseException:
            ranks.stop(0)
            _release(group)
            raise
        super().__init__(
            ranks,
            RankZero(lambda: _RemoteWorker(ranks), pause=lambda: ranks.listen(POLL_SECONDS)),
            patience=patience,
            release=lambda: _release(group),
        )


class Seat:
    """The actor: one rank's process on its node."""

    def __init__(self, key: bytes, holds_store: bool) -> None:
        self._host = ray.util.get_node_ip_address()
        self._key = key
        self._listener = Listener((self._host, 0), authkey=key)
        self._store = distributed.open_store(self._host) if holds_store else None

    def place(self) -> Place:
        """Where to find this rank."""
        return Place(
            self._host,
            ray.get_runtime_context().get_node_id(),
            os.getpid(),
            self._listener.address[1],
            None if self._store is None else self._store.port,
        )

    def serve(self, spec: RankSpec) -> None:
        """Run the rank until the executor closes the connection."""
        connection: Connection | None = None
        while connection is None:
            with suppress(AuthenticationError):  # a stranger; the executor knows the key
                connection = self._listener.accept()
        self._listener.close()
        _keep_alive(connection)
        serve(connection, spec, self._store)


class RayRank:
    """A rank in an actor."""

    def __init__(self, actor: Actor, place: Place, spec: RankSpec, key: bytes) -> None:
        """Let the actor serve, and connect to it."""
        self.number = spec.rank
        self.process_id = place.process_id
        self.place = f"process {place.process_id} on node {place.host} ({place.node_id[:8]})"
        self._actor = actor
        self._served = actor.serve.remote(spec)
        self.connection = Client((place.host, place.port))
        while not self.connection.poll(POLL_SECONDS):
            if ray.wait([self._served], timeout=0)[0]:
                ray.get(self._served)  # raises: the actor cannot read what it was sent
        answer_challenge(self.connection, key)
        deliver_challenge(self.connection, key)
        _keep_alive(self.connection)

    def kill(self) -> None:
        """End its process now; nothing happens to one that has ended."""
        if ray.is_initialized():
            ray.kill(self._actor)

    def wait(self, seconds: float) -> None:
        """Give it time to end by itself."""
        if ray.is_initialized():
            ray.wait([self._served], timeout=max(seconds, 0))

    def bury(self) -> None:
        """After `kill`: Ray sees to it."""

    def ending(self) -> str:
        """What Ray knows of one that closed its connection, which may be nothing yet."""
        try:
            ray.get(self._served, timeout=ENDING_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return "its connection broke off"
        except ray.exceptions.RayError as error:
            return str(error).strip()
        return "it closed its connection"


class _RemoteWorker:
    """Rank 0 as the executor's thread sees it: it runs what it is sent, and answers in order."""

    def __init__(self, ranks: Ranks) -> None:
        facts = ranks.facts
        assert facts is not None, "rank 0 is ready"
        self.vocab_size = facts.vocab_size
        self.eos_token_ids = facts.eos_token_ids
        self.max_model_len = facts.max_model_len
        self.num_blocks = facts.num_blocks
        self.block_size = facts.block_size
        self.results = ranks.results
        self.num_read = 0
        self._num_steps = 0

    def run(self, batch: Batch) -> "_RemotePending":
        """Expect the answer to a batch that has been sent."""
        del batch
        self._num_steps += 1
        return _RemotePending(self, self._num_steps)


class _RemotePending:
    """A step that rank 0 was sent."""

    def __init__(self, worker: _RemoteWorker, number: int) -> None:
        self._worker, self._number = worker, number

    @property
    def is_ready(self) -> bool:
        """True if the answer is here; whoever waits reads the connections meanwhile."""
        return len(self._worker.results) + self._worker.num_read >= self._number

    def result(self) -> StepResult:
        """The answer; those before it that nobody read are dropped."""
        worker = self._worker
        while worker.num_read < self._number - 1:
            worker.results.popleft()
            worker.num_read += 1
        worker.num_read += 1
        return worker.results.popleft()


def _resource(device: str) -> str:
    """What of Ray's a rank needs."""
    if device == "auto":
        return "GPU" if any(_counts("GPU")) else "CPU"
    return "GPU" if device.startswith("cuda") else "CPU"


def _counts(resource: str) -> list[float]:
    """How many each of the cluster's living nodes has, free or not."""
    return [node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]]


def _reserve(size: int, resource: str) -> Any:  # noqa: ANN401  # Ray's PlacementGroup
    """Room for all ranks at once: on one node if one is large enough."""
    counts = _counts(resource)
    if sum(counts) < size:
        raise ValueError(
            f"tensor_parallel_size is {size}, and the Ray cluster has {sum(counts):g} {resource}s: "
            "add nodes, or use a smaller size"
        )
    strategy = "STRICT_PACK" if max(counts) >= size else "PACK"
    group = placement_group([{resource: 1}] * size, strategy=strategy)
    try:
        if not group.wait(PLACE_SECONDS):
            raise RuntimeError(
                f"the Ray cluster had no room for {size} ranks ({strategy}, a {resource} each) "
                f"within {PLACE_SECONDS:g} s: free are {ray.available_resources()}"
            )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _seated(
    config: EngineConfig,
    make_worker: MakeWorker,
    group: Any,  # noqa: ANN401
    resource: str,
) -> list[RayRank]:
    """Start every rank, and have it load its shard."""
    size, key = config.tensor_parallel_size, secrets.token_bytes(32)
    seat = ray.remote(Seat)
    actors: list[Actor] = [
        seat.options(
            num_cpus=int(resource == "CPU"),
            num_gpus=int(resource == "GPU"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
        ).remote(key, rank == 0)
        for rank in range(size)
    ]
    places: list[Place] = []
    started: list[RayRank] = []
    try:
        asked = [actor.place.remote() for actor in actors]
        places.extend(ray.get(each, timeout=START_SECONDS) for each in asked)
        store_port = places[0].store_port
        assert store_port is not None, "rank 0 holds the store"
        for rank, (actor, place) in enumerate(zip(actors, places, strict=True)):
            spec = RankSpec(
                config,
                rank,
                size,
                (places[0].host, store_port),
                num_threads=1,
                make_worker=make_worker,
                host=place.host,
                answers=rank == 0,
            )
            started.append(RayRank(actor, place, spec, key))
    except BaseException as error:
        for actor in actors:
            ray.kill(actor)
        if isinstance(error, ray.exceptions.RayError | EOFError | OSError):
            number = len(started) if len(places) == size else len(places)
            raise RuntimeError(f"rank {number} of {size} did not start: {error}") from error
        raise
    return started


def _await_load(ranks: Ranks) -> None:
    """Wait until all are ready; a wrong checkpoint or option is raised as what it is."""
    try:
        while not ranks.reached("ready"):
            pass
    except RuntimeError as error:
        if isinstance(ranks.error, ValueError | OSError):
            raise ranks.error from error
        raise


def _release(group: Any) -> None:  # noqa: ANN401
    """Give the room back."""
    if ray.is_initialized():
        remove_placement_group(group)


def _keep_alive(connection: Connection) -> None:
    """No waiting for company on the way, and news of a machine that is gone within seconds."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_MILLISECONDS)
        for option, value in KEEPALIVE.items():
            link.setsockopt(socket.IPPROTO_TCP, option, value)
