"""The demo model on a CPU: nv, transformers and llama.cpp, one process each, in one run.

Batch 1 is 64 tokens in and 64 out; batch 16 has mixed lengths, and only requested tokens count (a
batched generate pads to the longest). Greedy, EOS ignored, medians.
`uv run --group bench benchmarks/cpu.py` installs the other engines.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from report import report
from workload import Workload, uniform_workload

Run = Callable[[Workload], None]
WORKERS = [
    ("nv", "bfloat16"),
    ("transformers", "bfloat16"),
    ("nv", "float32"),
    ("transformers", "float32"),
    ("llama.cpp", "q4_1"),
]


def mixed_workload(batch: int, seed: int) -> Workload:
    """Prompts and outputs of 16 to 128 tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randint(10, 40000) for _ in range(rng.randint(16, 128))] for _ in range(batch)]
    return Workload(prompts, [rng.randint(16, 128) for _ in range(batch)])


def nv(dtype: str) -> Run:
    from nv_api import LLM, SamplingParams

    llm = LLM("demo", device="cpu", dtype=dtype, max_num_seqs=16, max_model_len=1024)

    def run(work: Workload) -> None:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in work.output_lens
        ]
        outputs = llm.generate(work.prompts, params, use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == work.output_lens

    return run


def transformers(dtype: str) -> Run:
    import torch
    from nv_models.locate import demo_file
    from transformers import AutoModelForCausalLM

    path = demo_file()
    net = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)
    ).eval()

    def run(work: Workload) -> None:
        longest, num_tokens = max(map(len, work.prompts)), max(work.output_lens)
        ids = torch.zeros(len(work.prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(work.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = net.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        assert out.shape[1] == longest + num_tokens

    return run


def llama_cpp(_: str) -> Run:
    import xllamacpp
    from nv_models.locate import demo_file

    params = xllamacpp.CommonParams()
    params.model.path = str(demo_file())
    params.n_parallel = 16
    params.n_ctx = 16 * 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.cont_batching = True
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(16)

    def one(prompt: list[int], num_tokens: int) -> int:
        answer = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        if not isinstance(answer, dict):
            answer = json.loads(answer)
        return int(answer["usage"]["completion_tokens"])

    def run(work: Workload) -> None:
        counts = list(pool.map(one, work.prompts, work.output_lens))
        assert counts == work.output_lens, counts

    return run


ENGINES = {"nv": nv, "transformers": transformers, "llama.cpp": llama_cpp}


def measure(engine: str, dtype: str, repeats: int) -> dict[str, float]:
    """Tokens per second of one engine, in this process."""
    run = ENGINES[engine](dtype)
    run(mixed_workload(16, 0))
    run(uniform_workload(1, 64, 8, 99))
    figures = {}
    for name, make in (
        ("batch_1", lambda seed: uniform_workload(1, 64, 64, seed)),
        ("batch_16_mixed", lambda seed: mixed_workload(16, seed)),
    ):
        rates = []
        for repeat in range(repeats):
            work = make(repeat + 1)
            start = time.perf_counter()
            run(work)
            rates.append(work.num_output_tokens / (time.perf_counter() - start))
        figures[name] = round(statistics.median(rates), 1)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs=2, metavar=("ENGINE", "DTYPE"), help="one, in this process")
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(*args.only, args.repeats)))
        return
    rates: dict[str, dict[str, float]] = {}
    for engine, dtype in WORKERS:
        command = [sys.executable, __file__, "--only", engine, dtype, f"--repeats={args.repeats}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rates[f"{engine} {dtype}"] = json.loads(done.stdout.splitlines()[-1])
        print(f"{engine:13s} {dtype:9s} {rates[f'{engine} {dtype}']}", file=sys.stderr)
    ratios = {
        f"nv {dtype} / {peer}": {
            work: round(rates[f"nv {dtype}"][work] / rates[peer][work], 2)
            for work in ("batch_1", "batch_16_mixed")
        }
        for dtype in ("bfloat16", "float32")
        for peer in (f"transformers {dtype}", "llama.cpp q4_1")
    }
    report("cpu", {"model": "demo", "tokens_per_second": rates, "ratios": ratios}, args.save)


if __name__ == "__main__":
    main()
