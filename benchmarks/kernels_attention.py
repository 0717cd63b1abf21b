"""Attention kernels alone, against the read and the matmul ceiling of the same run.

CUDA graphs of many launches over rotated block tables; each case is checked against the
definition before and after it is timed. Peers: FlashAttention 3 where it is installed
(`flash_attn_interface`), else the figures of docs/, which name their card.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import replace

import torch
from attention_work import Work, decode_cases, graph_microseconds, prefill_cases, read_microseconds
from report import matmul_ceiling, report

ERROR_BOUND = 6e-3  # bf16: 2e-3 is usual, see the tests
PROCESSES = 8
LAUNCHES = {1: 40, 8: 20, 64: 12}  # by rows, else 10: a graph of over 200 microseconds
SETS = {1: 40, 8: 10, 64: 4}  # disjoint tables: more than L2 together


def compile_part(part: int) -> None:
    """Fill Triton's disk cache with every eighth case's kernels, on short rows."""
    for case in (decode_cases() + prefill_cases())[part::PROCESSES]:
        rows = tuple((min(query, 8), 64) for query, _ in case.rows)
        Work(replace(case, rows=rows), 1, 32_768).attend(0)
    torch.cuda.synchronize()


def measure(case, warm: int) -> dict[str, float | str]:
    rows = len(case.rows)
    decodes = case.rows[0][0] == 1
    work = Work(case, SETS.get(rows, 2) if decodes else 2)
    launches = LAUNCHES.get(rows, 10) if decodes else 6
    error = work.error()
    micros = graph_microseconds(work.attend, launches, warm=warm)
    figures = {
        "microseconds": round(micros, 2),
        "plan_microseconds": round(graph_microseconds(work.plan, 10), 2),
        "error": round(max(error, work.error()), 6),
    }
    if decodes:
        memory = work.kv.k.as_strided((work.kv.k.numel(),), (1,))
        ceiling = read_microseconds(memory, case.read_bytes, launches)
        figures["read_microseconds"] = round(ceiling, 2)
        figures["terabytes_per_second"] = round(case.read_bytes / micros / 1e6, 3)
        figures["share_of_read_ceiling"] = round(ceiling / micros, 3)
    else:
        figures["teraflops"] = round(case.flops / micros / 1e6, 1)
    if not figures["error"] < ERROR_BOUND:
        raise SystemExit(f"{case.name} is wrong: relative error {figures['error']}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-part", type=int)
    parser.add_argument("--sustained", action="store_true", help="heat the card before each case")
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.compile_part is not None:
        compile_part(args.compile_part)
        return
    command = [sys.executable, os.path.abspath(__file__), "--compile-part"]
    parts = [subprocess.Popen([*command, str(part)]) for part in range(PROCESSES)]
    codes = [part.wait() for part in parts]
    if any(codes):
        raise SystemExit("a kernel did not compile")
    figures = {}
    for case in decode_cases() + prefill_cases():
        launches = LAUNCHES.get(len(case.rows), 10)
        warm = 2000 // launches if args.sustained else 2
        figures[case.name] = measure(case, warm)
        print(case.name, figures[case.name], flush=True)
    load = "sustained" if args.sustained else "burst"
    ceiling = matmul_ceiling()
    figures = {"load": load, "cases": figures, "matmul_ceiling": ceiling}
    report("kernels_attention", figures, args.save)


if __name__ == "__main__":
    main()
