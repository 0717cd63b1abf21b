"""A hook that ends OpenMP's threads before the process forks.

GNU's OpenMP keeps the threads of a parallel region for the next region. A forked child does not
have these threads, but its first parallel region would wait for them for ever. So the forking
thread ends them first; the next region in the parent and in the child starts new ones.
"""

import ctypes
import os
from functools import partial

PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5.0: end all threads


def end_threads_at_fork(library: ctypes.CDLL) -> None:
    """End the threads of the OpenMP that a library is linked with, before each fork.

    An OpenMP without the call is left alone: LLVM's survives a fork without help.
    """
    pause = getattr(library, "omp_pause_resource_all", None)
    if pause is not None:
        os.register_at_fork(before=partial(pause, PAUSE_HARD))
