"""Controls on a card against transformers' logits processors on the same logits there.

Marked gpu. The cases are test_controls.py's.
"""

import pytest
import torch
from control_cases import PARAMS, WORDS, Rows, random_logits

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
MIXED = [*PARAMS, *PARAMS][:16]
SIZES = {"small": 50, "wide": 151_936}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def follow(names, num_known, num_steps, dtype=torch.float32, vocab_size=SIZES["small"]):
    """Check the logits of a few steps, each of which draws."""
    rows = Rows(names, num_known=num_known, device=DEVICE, vocab_size=vocab_size)
    for step in range(num_steps):
        logits_RV = random_logits(len(names), step, vocab_size=vocab_size).to(DEVICE, dtype)
        rows.check(logits_RV)
        rows.step(logits_RV)
    return rows


@pytest.mark.parametrize("num_known", [0, 4])
@pytest.mark.parametrize("name", PARAMS)
def test_a_control_alone(name, num_known):
    follow([name], num_known, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_rows_that_mix_controls(size, dtype):
    follow(MIXED, 1, 8, dtype, SIZES[size])


def test_a_bad_word_is_never_drawn():
    rows = follow(["words"] * 8 + ["plain"] * 8, 0, 60)
    texts = [f" {' '.join(map(str, drawn))} " for _, _, _, drawn in rows.rows]
    counts = [sum(f" {' '.join(map(str, word))} " in text for word in WORDS) for text in texts]
    assert counts[:8] == [0] * 8
    assert all(counts[8:])


def test_the_same_bits_as_on_the_cpu():
    """Each operation is rounded as the definition's is."""
    on_card, on_cpu = Rows(MIXED, device=DEVICE), Rows(MIXED)
    for step in range(8):
        logits_RV = random_logits(len(MIXED), step)
        there_RV = logits_RV.to(DEVICE)
        assert torch.equal(on_card.shaped(there_RV).cpu(), on_cpu.shaped(logits_RV))
        on_card.step(there_RV)
        on_cpu.step(logits_RV)
        assert [row[3] for row in on_card.rows] == [row[3] for row in on_cpu.rows]
