"""Two ranks through the public API: the same texts as one."""

from pathlib import Path

import pytest
from nv_api import LLM, SamplingParams
from tiny_checkpoint import make


@pytest.mark.slow
def test_n46_two_ranks_answer_as_one(tmp_path: Path) -> None:
    """The vocabulary of 258 does not divide: it is padded."""
    checkpoint = str(make(tmp_path))
    prompts = [("the quick brown fox jumps over the lazy dog " * 10)[:n] for n in (255, 300, 400)]
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(temperature=0.7, seed=3, max_tokens=24, min_p=0.05, ignore_eos=True, n=2),
    ]
    said = {}
    for size in (1, 2):
        options = {"kvcache_block_size": 32, "max_num_batched_tokens": 300, "max_num_seqs": 4}
        with LLM(checkpoint, device="cpu", tensor_parallel_size=size, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        said[size] = [(part.token_ids, part.text) for o in outputs for part in o.outputs]
    assert said[2] == said[1]


def test_a_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size 3 .*num_attention_heads = 4"):
        LLM(str(make(tmp_path)), device="cpu", tensor_parallel_size=3)
