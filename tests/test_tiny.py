"""Touches every layer once: text in, text out, and the same greedy ids as transformers."""

from pathlib import Path

import pytest
import torch
from nv_api import LLM, SamplingParams
from tiny_checkpoint import make
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"))


def test_generate_equals_transformers(checkpoint: Path) -> None:
    prompts = ["hello", "the quick brown fox jumps over the lazy dog", "x"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(checkpoint), device="cpu", kvcache_block_size=16) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        start = len(ids)
        with torch.inference_mode():
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert output["token_ids"] == ids[start:]
        assert output["text"] == tokenizer.decode(ids[start:], skip_special_tokens=True)
