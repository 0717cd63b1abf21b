"""Attention kernels alone, against the read and the matmul ceiling of the same run.

CUDA graphs of many launches over rotated block tables; each case is checked against the definition
before and after it is timed. Peers: the installed FlashAttention package, through the backend
`flash_attn` over the same cache, and torch's own attention if rows are equal. `kernels.py` runs it.
"""

from dataclasses import replace
from multiprocessing import get_context

import torch
from attention_work import Work, decode_cases, graph_microseconds, prefill_cases, read_microseconds

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


def measure(case, warm: int) -> dict[str, float]:
    rows = len(case.rows)
    decodes = case.rows[0][0] == 1
    work = Work(case, SETS.get(rows, 2) if decodes else 2)
    launches = LAUNCHES.get(rows, 10) if decodes else 6
    micros, error = checked(work, work.attend, launches, warm)
    figures = {
        "microseconds": round(micros, 2),
        "plan_microseconds": round(graph_microseconds(work.plan, 10), 2),
        "error": error,
    }
    if flash := work.flash():
        theirs, figures["flash_attn_error"] = checked(work, flash, launches, warm)
        figures["flash_attn_microseconds"] = round(theirs, 2)
    if dense := work.dense():
        figures["torch_microseconds"] = round(graph_microseconds(dense, launches, warm=warm), 2)
    if decodes:
        memory = work.kv.k.as_strided((work.kv.k.numel(),), (1,))
        ceiling = read_microseconds(memory, case.read_bytes, launches)
        figures["read_microseconds"] = round(ceiling, 2)
        figures["terabytes_per_second"] = round(case.read_bytes / micros / 1e6, 3)
        figures["share_of_read_ceiling"] = round(ceiling / micros, 3)
    else:
        figures["teraflops"] = round(case.flops / micros / 1e6, 1)
    return figures


def checked(work: Work, attend, launches: int, warm: int) -> tuple[float, float]:
    """Microseconds per launch, and the relative error before or after the timing."""
    error = work.error(attend)
    micros = graph_microseconds(attend, launches, warm=warm)
    error = round(max(error, work.error(attend)), 6)
    if not error < ERROR_BOUND:
        raise SystemExit(f"{work.case.name} is wrong: relative error {error}")
    return micros, error


def attention_cases(sustained: bool) -> dict[str, dict[str, float]]:
    """Time every case; `sustained` heats the card before each."""
    with get_context("spawn").Pool(PROCESSES) as pool:
        pool.map(compile_part, range(PROCESSES), chunksize=1)
    found = {}
    for case in decode_cases() + prefill_cases():
        launches = LAUNCHES.get(len(case.rows), 10)
        found[case.name] = measure(case, 2000 // launches if sustained else 2)
        print(case.name, found[case.name], flush=True)
    return found
