"""Mixtures of experts through LLM: alone, in a batch, in chunks, and after a prefix hit."""

import pytest
import torch
from nv_api import LLM, SamplingParams
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "dtype": "float32",
}
MODELS = {
    "Qwen3Moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48,
            norm_topk_prob=True, mlp_only_layers=[1],
        )
    ),
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
}  # fmt: skip
PROMPTS = [[(37 * i + 11 * start) % 320 for i in range(n)] for start, n in enumerate((40, 1, 23))]
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp(request.param)
    MODELS[request.param]().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def expected(folder):
    """transformers' greedy ids."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(prompt):
        ids = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
            max_new_tokens=32, min_new_tokens=32, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return ids[0, len(prompt) :].tolist()

    return [greedy(prompt) for prompt in PROMPTS]


def make(folder, **options):
    sizes = {"max_model_len": 128, "kvcache_block_size": 16, "num_kvcache_blocks": 64}
    return LLM(str(folder), skip_tokenizer_init=True, **sizes, **options)


def ids(outputs):
    return [output["token_ids"] for output in outputs]


def test_greedy_ids_are_transformers(folder, expected):
    with make(folder) as llm:
        alone = [ids(llm.generate([prompt], PARAMS, use_tqdm=False))[0] for prompt in PROMPTS]
        assert alone == expected
        again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)  # in one batch
        assert again[0].num_cached_tokens > 0
        assert ids(again) == expected


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 16}, {"deterministic": True}])
def test_chunks_and_batch_invariance(folder, expected, options):
    with make(folder, **options) as llm:
        assert ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
