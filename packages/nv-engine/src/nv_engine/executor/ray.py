"""RayExecutor: ranks on the nodes of a Ray cluster, each an actor that holds one shard.

Owns the room for the ranks in the cluster, and its return. Ray finds the nodes and ends the
processes; messages between a rank and the executor do not go through Ray.
"""

import secrets
from dataclasses import replace
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nv_engine.config import EngineConfig
from nv_engine.device.start import start_runner
from nv_engine.executor.member import MakeWorker, RankSpec
from nv_engine.executor.parallel import ParallelExecutor, Patience, located
from nv_engine.executor.ray_actor import Actor, RankActor, RankAddress, RayRank
from nv_engine.executor.watch import RankWatch

PLACE_SECONDS = 60.0
"""For the cluster to have room for all ranks at once."""
START_SECONDS = 120.0
"""For a process to start and import torch."""


class RayExecutor(ParallelExecutor):
    """Runs batches on `tensor_parallel_size` ranks, wherever in a Ray cluster they find room.

    All ranks are on one node if a node has that many cards (or cores, for a CPU), else on as few as
    Ray can manage. The caller needs no card. The model's folder must be at the same path on every
    node, and this package be installed there.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_worker: MakeWorker = start_runner,
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
        try:
            ranks = RankWatch(
                _start_ranks(config, make_worker, group, resource), config.tensor_parallel_size
            )
        except BaseException:
            _release(group)
            raise
        super().__init__(ranks, patience=patience, release=lambda: _release(group))


def _resource(device: str) -> str:
    """The resource that Ray counts for a rank."""
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


def _start_ranks(
    config: EngineConfig,
    make_worker: MakeWorker,
    group: Any,  # noqa: ANN401
    resource: str,
) -> list[RayRank]:
    """Start every rank, and have it load its shard."""
    size, key = config.tensor_parallel_size, secrets.token_bytes(32)
    remote_actor = ray.remote(RankActor)
    actors: list[Actor] = [
        remote_actor.options(
            num_cpus=int(resource == "CPU"),
            num_gpus=int(resource == "GPU"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
        ).remote(key, rank == 0)
        for rank in range(size)
    ]
    places: list[RankAddress] = []
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


def _release(group: Any) -> None:  # noqa: ANN401
    """Return the room to the cluster."""
    if ray.is_initialized():
        remove_placement_group(group)
