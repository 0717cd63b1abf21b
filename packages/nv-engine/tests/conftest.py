"""A tiny random Qwen3 checkpoint whose argmax is stable, and what transformers makes of it.

Makes the modules beside this file importable: control_cases.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 320
sys.path.append(str(Path(__file__).parent))
Greedy = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """OpenMP threads that spin for a busy core make every call slow."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 4 query and 2 KV heads, fp32; the weights are large so that logits spread."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=[1, 2],
        dtype="float32",
        initializer_range=0.15,
    )
    model = Qwen3ForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def greedy(checkpoint: Path) -> Greedy:
    """transformers' greedy continuation, EOS ignored."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def continue_(prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(num_tokens):
                logits = model(torch.tensor([ids])).logits[0, -1]
                ids.append(int(logits.argmax()))
        return ids[len(prompt) :]

    return continue_
