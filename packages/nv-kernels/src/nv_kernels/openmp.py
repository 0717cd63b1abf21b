"""OpenMP's threads, when the process forks.

GNU's OpenMP keeps the threads of a parallel region for the next one. They are not in a child, where
it waits for them for ever: at the first product of torch's or loop of ours. So the thread that
forks ends them before; the next region of parent and child starts its own.

Owns that hook. Never starts a thread.
"""

import ctypes
import os
from functools import partial

PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5.0: keep nothing


def end_threads_at_fork(library: ctypes.CDLL) -> None:
    """Have the OpenMP that a library is linked with end its threads before each fork.

    One that lacks the call is left alone: LLVM's OpenMP survives a fork by itself.
    """
    pause = getattr(library, "omp_pause_resource_all", None)
    if pause is not None:
        os.register_at_fork(before=partial(pause, PAUSE_HARD))
