"""The reference workload: 256 random prompts of 100 to 1,024 ids, 133,966 tokens to generate."""

import argparse

from engines import ENGINES
from profiling import profiled
from report import matmul_ceiling, read_ceiling, report
from workload import QWEN3, bound_seconds, model_folder, reference_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="nv")
    parser.add_argument("--model", choices=QWEN3, default="qwen3-0.6b")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="NCCL sums all")
    parser.add_argument("--max-num-batched-tokens", type=int, help="a step; the engine's default")
    parser.add_argument("--deterministic", action="store_true", help="nv's deterministic mode")
    parser.add_argument("--profile", action="store_true", help="print where a run's time goes")
    parser.add_argument("--save", help="write the JSON to this file too")
    args = parser.parse_args()

    options = {"max_model_len": 4096}
    if args.kv_cache_dtype != "auto":
        options["kv_cache_dtype"] = args.kv_cache_dtype
    if args.max_num_batched_tokens is not None:
        options["max_num_batched_tokens"] = args.max_num_batched_tokens
    if args.deterministic:
        options["deterministic"] = True
    if args.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = args.tensor_parallel_size
        options["disable_custom_all_reduce"] = args.disable_custom_all_reduce
    bandwidth, flops = read_ceiling(), matmul_ceiling()  # while the card is empty
    run = ENGINES[args.engine](str(model_folder(args.model)), **options)
    work = reference_workload(args.num_seqs)
    run(reference_workload(args.num_seqs, seed=1))  # warm up: compile, capture; other prompts
    seconds = run(work)
    figures = {
        "engine": args.engine,
        "model": args.model,
        "kv_cache_dtype": args.kv_cache_dtype,
        "deterministic": args.deterministic,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "tensor_parallel_size": args.tensor_parallel_size,
        "disable_custom_all_reduce": args.disable_custom_all_reduce,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(work.num_output_tokens / seconds),
    }
    bound = (
        bound_seconds(args.model, work, bandwidth, flops, 1 if args.kv_cache_dtype == "fp8" else 2)
        / args.tensor_parallel_size
    )
    figures |= {
        "bound_seconds": round(bound, 3),
        "bound_over_measured": round(bound / seconds, 3),
        "copy_terabytes_per_second": round(bandwidth / 1e12, 3),
        "matmul_teraflops": round(flops / 1e12),
    }
    if args.profile:
        figures["profile"] = profiled(lambda: run(reference_workload(args.num_seqs, seed=2)))
    name = "throughput_deterministic" if args.deterministic else "throughput"
    report(name, figures, args.save)


if __name__ == "__main__":
    main()
