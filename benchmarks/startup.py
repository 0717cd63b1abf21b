"""Time from the LLM(...) call to the first token, without imports; run twice for warm caches."""

import argparse
import time

start_of_process = time.perf_counter()

from report import report  # noqa: E402
from workload import QWEN3, model_folder  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=QWEN3, default="qwen3-0.6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--save")
    args = parser.parse_args()
    import torch  # noqa: F401

    torch_imported = time.perf_counter()
    from nv_api import LLM, SamplingParams

    imported = time.perf_counter()
    folder = str(model_folder(args.model))
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, device=args.device)
    loaded = time.perf_counter()
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
