"""The trained checkpoint, and text that it has never seen.

Makes `measures` importable, and `test_device_gpu` beside this folder: its runner and its roads.
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoint"
PASSAGE = 320  # bytes; the model was trained on contexts of 512
sys.path += [str(HERE), str(HERE.parent)]


@pytest.fixture(scope="session")
def trained() -> Path:
    """A Qwen3 of five layers in bf16, made by benchmarks/train_tiny.py on one card."""
    return CHECKPOINT


@pytest.fixture(scope="session")
def passages() -> list[list[int]]:
    """The held-out text in passages: a token is a byte."""
    text = (HERE / "held_out.txt").read_bytes()
    return [list(text[start : start + PASSAGE]) for start in range(0, len(text), PASSAGE)]


@pytest.fixture(scope="session")
def prompts(passages: list[list[int]]) -> list[list[int]]:
    """Beginnings of unlike lengths; every third continues the same 70 bytes."""
    lengths = [1, 2, 15, 16, 17, 31, 40, 60, 64, 65, 90, 120]
    own = [passages[i % len(passages)][:length] for i, length in enumerate(lengths)]
    return [(passages[0][:70] if i % 3 == 0 else []) + ids for i, ids in enumerate(own)]
