"""Prompts alone: tokens per second over 64 prompts of 1,024 random ids, one token each."""

import argparse

from engines import ENGINES
from report import matmul_ceiling, read_ceiling, report
from workload import QWEN3, bound_seconds, model_folder, uniform_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="nv")
    parser.add_argument("--model", choices=QWEN3, default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save")
    args = parser.parse_args()

    bandwidth, flops = read_ceiling(), matmul_ceiling()  # while the card is empty
    run = ENGINES[args.engine](
        str(model_folder(args.model)), max_model_len=max(4096, args.prompt_len + 1)
    )
    times = [
        run(uniform_workload(args.batch, args.prompt_len, 1, seed))
        for seed in range(args.repeats + 2)  # new prompts each time, so that no prefix is cached
    ]
    seconds = sorted(times[2:])[args.repeats // 2]
    num_tokens = args.batch * args.prompt_len
    work = uniform_workload(args.batch, args.prompt_len, 1)
    bound = bound_seconds(args.model, work, bandwidth, flops)
    figures = {
        "engine": args.engine,
        "model": args.model,
        "batch": args.batch,
        "prompt_len": args.prompt_len,
        "seconds": round(seconds, 4),
        "prompt_tokens_per_second": round(num_tokens / seconds),
        "bound_tokens_per_second": round(num_tokens / bound),
        "bound_over_measured": round(bound / seconds, 3),
    }
    report("prefill", figures, args.save)


if __name__ == "__main__":
    main()
