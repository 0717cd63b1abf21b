"""A spawned rank: a process of this host, as the process that started it sees it, and its own main.

Owns its pipe and its first message. Never looks into a later one.
"""

import os
import pickle
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from nv_engine.executor.member import RankSpec, serve
from nv_engine.spawned import SpawnedProcess

ENTRY = "nv_engine.executor.spawn:main"


class SpawnedRank(SpawnedProcess):
    """A rank in a process of its own."""

    def __init__(self, spec: RankSpec) -> None:
        """Start the process."""
        self.number = spec.rank
        self.connection, theirs = Pipe()
        super().__init__(ENTRY, theirs.fileno(), {"OMP_NUM_THREADS": str(spec.num_threads)})
        try:
            theirs.close()
            self.connection.send_bytes(pickle.dumps(spec))
        except BaseException:
            self.kill()  # the caller has no handle yet
            raise

    @property
    def place(self) -> str:
        """Where it runs, for a message."""
        return f"process {self.process_id}"


def main(pipe: int) -> None:
    """Run a rank whose pipe has this file number."""
    connection = Connection(pipe)
    try:
        spec: RankSpec = pickle.loads(connection.recv_bytes())
        _worker = serve(connection, spec)
    except BaseException:  # `serve` has reported its own; of any other the parent sees the end
        os._exit(1)
    os._exit(0)  # at once: nothing here outlives the process, and taking torch down takes a second
