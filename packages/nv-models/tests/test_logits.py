"""Logits of tiny checkpoints against transformers' on the same weights."""

import pytest
import torch
import transformers
from nv_kernels.cpp.library import find_compiler
from nv_models import load_model
from safetensors.torch import load_file

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "group 1": {"num_key_value_heads": 4},
    "group 2": {"num_key_value_heads": 2},
    "group 4, head_dim 128": {"num_key_value_heads": 1, "head_dim": 128},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "rope_theta": {"spelling": "rope_theta"},
    "linear": {"rope": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope": YARN},
    "yarn, rope_theta": {"rope": YARN, "spelling": "rope_theta"},
    "llama3": {"rope": LLAMA3},
    "llama3, rope_theta": {"rope": LLAMA3, "spelling": "rope_theta"},
}
PROMPT = [(37 * i + 11) % 320 for i in range(100)]


def transformers_logits(folder, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("case", CASES)
def test_fp32_full_prompt_and_step_by_step(tiny_checkpoint, paged_runner, kind, case):
    folder = tiny_checkpoint(kind, **CASES[case])
    expected = transformers_logits(folder, torch.float32)
    assert expected.std() > 1  # the weights are wide enough to mean something
    model = load_model(folder)
    assert model.config.dtype == torch.float32

    full = paged_runner(model).step(PROMPT)
    torch.testing.assert_close(full, expected, atol=1e-4, rtol=0)

    runner = paged_runner(model)
    parts = [runner.step(PROMPT[:37]), runner.step(PROMPT[37:80])]
    parts += [runner.step([token]) for token in PROMPT[80:]]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


def test_fewer_positions_are_the_same_ones(tiny_checkpoint, paged_runner):
    folder = tiny_checkpoint("qwen3", **CASES["yarn"])
    whole, short = load_model(folder), load_model(folder, max_positions=len(PROMPT))
    rope = whole.config.ropes[0]
    assert len(short.model.cos_sin[rope]) == short.config.max_length == len(PROMPT)
    longer = load_model(folder, max_positions=10**12)
    assert len(longer.model.cos_sin[rope]) == len(whole.model.cos_sin[rope])
    assert torch.equal(paged_runner(short).step(PROMPT), paged_runner(whole).step(PROMPT))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("case", ["group 2", "group 4, head_dim 128", "yarn"])
def test_bf16_is_as_close_to_fp32_as_transformers(tiny_checkpoint, paged_runner, kind, case):
    folder = tiny_checkpoint(kind, dtype=torch.bfloat16, **CASES[case])
    exact = transformers_logits(folder, torch.float32)
    theirs = transformers_logits(folder, torch.bfloat16).float()
    model = load_model(folder)
    assert model.config.dtype == torch.bfloat16
    ours = paged_runner(model).step(PROMPT).float()

    def error(logits):
        return ((logits - exact).norm() / exact.norm()).item()

    assert error(ours) < 1.25 * error(theirs)


@pytest.mark.skipif(not find_compiler(), reason="without a C++ compiler logits are rounded")
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_fp32_and_not_rounded(tiny_checkpoint, tied):
    folder = tiny_checkpoint("qwen3", dtype=torch.bfloat16, tie_word_embeddings=tied)
    model = load_model(folder)
    table = "model.embed_tokens" if tied else "lm_head"
    weight = load_file(folder / "model.safetensors")[f"{table}.weight"]
    hidden = torch.randn(5, model.config.hidden_size).bfloat16()
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    expected = hidden.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
