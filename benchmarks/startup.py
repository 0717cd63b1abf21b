"""Time from the LLM(...) call to the first token, without imports; run twice for warm caches.

`--pooling` times the first embedding in place of the first token, for which an engine needs neither
a head nor a draw.
"""

import argparse
import time

start_of_process = time.perf_counter()

from report import report  # noqa: E402
from workload import QWEN3, model_folder  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=QWEN3, default="qwen3-0.6b")
    parser.add_argument("--pooling", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--save")
    args = parser.parse_args()
    import torch  # noqa: F401

    torch_imported = time.perf_counter()
    from nv_api import LLM, SamplingParams

    imported = time.perf_counter()
    folder = str(model_folder(args.model))
    options = {"runner": "pooling"} if args.pooling else {}
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, device=args.device, **options)
    loaded = time.perf_counter()
    if args.pooling:
        llm.embed([[1, 2, 3]], use_tqdm=False)
        first = time.perf_counter()
        figures = {
            "model": args.model,
            "construct_seconds": round(loaded - imported, 2),
            "first_embedding_seconds": round(first - loaded, 2),
            "call_to_first_embedding_seconds": round(first - imported, 2),
        }
        report("startup_pooling", figures, args.save)
        return
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    first = time.perf_counter()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    figures = {
        "model": args.model,
        "torch_import_seconds": round(torch_imported - start_of_process, 2),
        "nv_import_seconds": round(imported - torch_imported, 2),
        "construct_seconds": round(loaded - imported, 2),
        "first_token_seconds": round(first - loaded, 2),
        "call_to_first_token_seconds": round(first - imported, 2),
        "eight_tokens_after_seconds": round(time.perf_counter() - first, 2),
    }
    report("startup", figures, args.save)


if __name__ == "__main__":
    main()
