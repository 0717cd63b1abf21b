"""OpenMP and a fork: parallel regions of torch and of the C++ kernels go on in a child."""

import os
import subprocess
import sys

FORK = """
import os, signal, threading
import torch
import nv_kernels as nk

def work():
    x = torch.randn(512, 2048)
    nk.linear(x, nk.pack_weight(torch.randn(256, 2048)))
    nk.rms_norm(x, torch.ones(2048), 1e-5)
    (x @ x.T).exp().sum()
    torch.get_num_threads() > 1 or exit("one thread proves nothing")

def fork():
    work()
    child = os.fork()
    if not child:
        signal.alarm(30)
        work()
        os._exit(0)
    statuses.append(os.waitpid(child, 0)[1])
    work()

statuses = []
fork()
thread = threading.Thread(target=fork)
thread.start()
thread.join()
assert statuses == [0, 0], statuses
"""


def test_b08_parallel_regions_go_on_in_a_child_and_in_its_parent():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=200, env=environment)
