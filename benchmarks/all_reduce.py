"""Sums over two or more cards: NCCL followed by the norm, against the sum inside the norm.

Microseconds per sum, in a CUDA graph of 64 sums, one after another as in the layers of a model.
"""

import argparse
import os
import sys
from typing import Any

import nv_kernels as nk
import torch
import torch.multiprocessing as mp
from nv_engine.device import rendezvous
from nv_engine.device.peers import open_peers
from nv_engine.executor.process import PAIR_ROWS
from nv_models import TensorParallel
from report import report

ROWS = (1, 16, 64, 256, 1024, 16384)
NUM_SUMS = 64
NUM_PARTIALS = 4
EPS = 1e-6
WAYS = ("norm alone", "NCCL + norm", "one launch", "of partials")


class Sums:
    """One rank's tensors of a size, and the ways to sum them."""

    def __init__(self, parallel: TensorParallel, rows: int, width: int, device: torch.device):
        torch.manual_seed(parallel.rank)
        self.parallel = parallel
        self.part = torch.randn(rows, width, device=device).bfloat16()
        self.partials = torch.randn(NUM_PARTIALS, rows, width, device=device)
        self.buffer = torch.empty_like(self.part)  # NCCL sums in place
        self.weight = torch.ones(width, device=device).bfloat16()
        torch.manual_seed(99)
        self.residual = torch.randn(rows, width, device=device).bfloat16()

    def prepare(self) -> None:
        self.buffer.copy_(self.part)

    def step(self, way: str, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if way == "norm alone":
            return nk.add_rms_norm(self.part, residual, self.weight, EPS)
        if way == "NCCL + norm":
            total = self.parallel.all_reduce(self.buffer)
            return nk.add_rms_norm(total, residual, self.weight, EPS)
        part, peers = self.partials if way == "of partials" else self.part, self.parallel.peers
        assert peers is not None, "the cards do not reach each other"
        return nk.all_reduce_add_rms_norm(part, residual, self.weight, EPS, peers)

    def is_equal(self) -> bool:
        """The sums have the same bits (two cards), the norms differ by rounding."""
        self.prepare()
        library, fused = (self.step(way, self.residual) for way in ("NCCL + norm", "one launch"))
        if self.parallel.size == 2 and not torch.equal(library[1], fused[1]):
            return False
        close = [
            torch.isclose(a, b, rtol=2**-6, atol=2**-6) for a, b in zip(library, fused, strict=True)
        ]
        return all(bool(each.all()) for each in close)

    def microseconds(self, way: str, repeats: int) -> float:
        self.prepare()
        self.step(way, self.residual)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            residual = self.residual
            for _ in range(NUM_SUMS):
                _, residual = self.step(way, residual)
        times = []
        for _ in range(repeats + 3):
            self.prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / NUM_SUMS)
        return sorted(times[3:])[repeats // 2]


def run_rank(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = rendezvous.find_store(rendezvous.LOOPBACK, port)
    parallel = TensorParallel(rank, size, rendezvous.join(store, rank, size, device))
    peers = open_peers(store, parallel, device, PAIR_ROWS, args.width)
    parallel = TensorParallel(rank, size, parallel.group, peers)
    rows = [measure(parallel, each, args, device) for each in ROWS]
    torch.cuda.synchronize()
    if rank == 0:
        figures = {"cards": size, "width": args.width, "num_sums": NUM_SUMS, "rows": rows}
        report("all_reduce", figures, args.save)
    sys.stdout.flush()
    os._exit(0)  # destroying NCCL would wait for the graphs


def measure(
    parallel: TensorParallel, rows: int, args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    sums = Sums(parallel, rows, args.width, device)
    found: dict[str, Any] = {"rows": rows, "equal": sums.is_equal()}
    found |= {way: round(sums.microseconds(way, args.repeats), 2) for way in WAYS}
    if parallel.rank == 0:
        if rows == ROWS[0]:
            print(f"{'rows':>6}{'equal':>7}" + "".join(f"{way:>14}" for way in WAYS), flush=True)
        print(
            f"{rows:6}{found['equal']!s:>7}" + "".join(f"{found[way]:14.2f}" for way in WAYS),
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--save")
    args = parser.parse_args()
    store = rendezvous.open_store()
    mp.spawn(run_rank, (args.cards, store.port, args), nprocs=args.cards)


if __name__ == "__main__":
    main()
