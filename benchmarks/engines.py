"""The engines that a benchmark can run, each as one function: prompts as ids in, seconds out.

An engine is imported only when it is used. It runs greedy or at temperature 0.6, with EOS ignored.
"""

import time
from collections.abc import Callable
from typing import Any

from workload import Workload

Run = Callable[[Workload], float]
TEMPERATURE = 0.6


def nv(model: str, **options: Any) -> Run:
    from nv_api import LLM, SamplingParams

    defaults = {"load_format": "dummy", "skip_tokenizer_init": True}
    return _llm(LLM(model, **defaults | options), SamplingParams)


def vllm(model: str, **options: Any) -> Run:
    from vllm import LLM, SamplingParams

    defaults = {"load_format": "dummy", "skip_tokenizer_init": True}
    return _llm(LLM(model, **defaults | options), SamplingParams, prompt_dicts=True)


def nanovllm(model: str, **options: Any) -> Run:
    from nanovllm import LLM, SamplingParams

    return _llm(LLM(model, **options), SamplingParams)


def _llm(llm: Any, params_type: Any, prompt_dicts: bool = False) -> Run:
    def run(work: Workload) -> float:
        params = [
            params_type(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n)
            for n in work.output_lens
        ]
        prompts: list[Any] = work.prompts
        if prompt_dicts:
            prompts = [{"prompt_token_ids": ids} for ids in prompts]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run.llm = llm  # type: ignore[attr-defined]
    return run


def transformers(model: str, **options: Any) -> Run:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(model)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()

    def run(work: Workload) -> float:
        longest = max(map(len, work.prompts))
        ids = torch.zeros(len(work.prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(work.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        num_tokens = max(work.output_lens)
        start = time.perf_counter()
        net.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
        )
        return time.perf_counter() - start

    return run


ENGINES = {"nv": nv, "vllm": vllm, "nanovllm": nanovllm, "transformers": transformers}
