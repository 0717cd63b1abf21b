"""One request alone, 128 tokens in and 256 out: milliseconds per token after the first.

It is the difference of two runs, one with `--output-len` tokens and one with `--shared-len`: so the
prompts, and the steps in which not all rows decode yet, do not count.
"""

import argparse

from engines import ENGINES
from report import matmul_ceiling, read_ceiling, report
from workload import QWEN3, bound_seconds, model_folder, uniform_workload


def main(
    name: str = "latency",
    batch: int = 1,
    prompt_len: int = 128,
    output_len: int = 256,
    shared_len: int = 1,
) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="nv")
    parser.add_argument("--model", choices=QWEN3, default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--prompt-len", type=int, default=prompt_len)
    parser.add_argument("--output-len", type=int, default=output_len)
    parser.add_argument("--shared-len", type=int, default=shared_len)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="NCCL sums all")
    parser.add_argument("--save")
    args = parser.parse_args()

    options = {} if args.kv_cache_dtype == "auto" else {"kv_cache_dtype": args.kv_cache_dtype}
    if args.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = args.tensor_parallel_size
        options["disable_custom_all_reduce"] = args.disable_custom_all_reduce
    kv_bytes = 2 if args.kv_cache_dtype == "auto" else 1
    max_len = args.prompt_len + args.output_len + 64
    bandwidth, flops = read_ceiling(), matmul_ceiling()  # while the card is empty
    run = ENGINES[args.engine](
        str(model_folder(args.model)),
        max_model_len=max(4096, max_len),
        max_num_seqs=args.batch,
        **options,
    )
    lengths = sorted({1, args.shared_len, args.output_len})
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for seed in range(args.repeats + 2):  # new prompts each time, so that no prefix is cached
        for index, length in enumerate(lengths):
            work = uniform_workload(args.batch, args.prompt_len, length, 3 * seed + index)
            seconds[length].append(run(work))
    median = {length: sorted(each[2:])[args.repeats // 2] for length, each in seconds.items()}

    def a_token(of: dict[int, float]) -> float:
        steps = args.output_len - args.shared_len
        return (of[args.output_len] - of[args.shared_len]) / steps * 1e3

    bounds = {
        length: bound_seconds(
            args.model,
            uniform_workload(args.batch, args.prompt_len, length),
            bandwidth,
            flops,
            kv_bytes,
        )
        for length in lengths
    }
    milliseconds, bound = a_token(median), a_token(bounds) / args.tensor_parallel_size
    figures = {
        "engine": args.engine,
        "model": args.model,
        "batch": args.batch,
        "kv_cache_dtype": args.kv_cache_dtype,
        "tensor_parallel_size": args.tensor_parallel_size,
        "disable_custom_all_reduce": args.disable_custom_all_reduce,
        "prompt_len": args.prompt_len,
        "output_len": args.output_len,
        "shared_len": args.shared_len,
        "first_token_ms": round(median[1] * 1e3, 3),
        "ms_per_token": round(milliseconds, 4),
        "tokens_per_second": round(args.batch * 1e3 / milliseconds),
        "bound_ms": round(bound, 4),
        "bound_over_measured": round(bound / milliseconds, 3),
    }
    report(name, figures, args.save)


if __name__ == "__main__":
    main()
