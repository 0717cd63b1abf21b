"""A rank in a Ray actor: the actor on its node, and the handle of it that the executor holds.

Owns the connection between the two: batches, results and signs of life travel over it as between
processes of one host, for it keeps their order and tells of a dead rank at once.
"""

import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, NamedTuple, TypeAlias

import ray

from nv_engine.device import rendezvous
from nv_engine.executor.member import RankSpec, serve
from nv_engine.executor.watch import POLL_SECONDS

ENDING_SECONDS = 1.0
HANDSHAKE_SECONDS = 5
"""Time for a peer that connects to answer."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 4}
"""A machine that vanished is noticed after 2 + 4 x 1 seconds..."""
UNSENT_MILLISECONDS = 6000
"""... or after this time if something was sent to it."""

Actor: TypeAlias = Any
"""A handle that Ray made; Ray's types are not checked, for it is an extra."""


class RankAddress(NamedTuple):
    """Where a rank is."""

    host: str
    node_id: str
    process_id: int
    port: int
    """Of its connection."""
    store_port: int | None
    """Of the ranks' meeting place, which rank 0 holds."""


class RankActor:
    """The actor: one rank's process on its node."""

    def __init__(self, key: bytes, holds_store: bool) -> None:
        self._host = ray.util.get_node_ip_address()
        self._key = key
        self._listener = Listener((self._host, 0))
        self._store = rendezvous.open_store(self._host) if holds_store else None

    def place(self) -> RankAddress:
        """Where to find this rank."""
        return RankAddress(
            self._host,
            ray.get_runtime_context().get_node_id(),
            os.getpid(),
            self._listener.address[1],
            None if self._store is None else self._store.port,
        )

    def serve(self, spec: RankSpec) -> None:
        """Run the rank until the executor closes the connection."""
        while not self._knows_the_key(connection := self._listener.accept()):
            connection.close()  # another program's
        self._listener.close()
        _keep_alive(connection)
        serve(connection, spec, self._store)

    def _knows_the_key(self, connection: Connection) -> bool:
        """True for the executor; any other peer fails the challenge or does not answer."""
        try:
            _limit_waits(connection, HANDSHAKE_SECONDS)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            _limit_waits(connection, 0)
        except (AuthenticationError, EOFError, OSError):
            return False
        return True


class RayRank:
    """A rank in an actor."""

    def __init__(self, actor: Actor, place: RankAddress, spec: RankSpec, key: bytes) -> None:
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
        """Wait at most `seconds` for it to end by itself."""
        if ray.is_initialized():
            ray.wait([self._served], timeout=max(seconds, 0))

    def reap(self) -> None:
        """After `kill`: nothing to do, Ray removes the process."""

    def ending(self) -> str:
        """How one that closed its connection ended, as far as Ray knows yet."""
        try:
            ray.get(self._served, timeout=ENDING_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return "its connection broke off"
        except ray.exceptions.RayError as error:
            return str(error).strip()
        return "it closed its connection"


def _limit_waits(connection: Connection, seconds: int) -> None:
    """A read that waits longer raises BlockingIOError; 0: no limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _keep_alive(connection: Connection) -> None:
    """No waiting for company on the way, and news of a machine that is gone within seconds."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_MILLISECONDS)
        for option, value in KEEPALIVE.items():
            link.setsockopt(socket.IPPROTO_TCP, option, value)
