"""Architectures in the engine: alone, in chunks beside others, and after a prefix hit."""

import importlib.util
from pathlib import Path

import pytest
import torch
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams

TINY = Path(__file__).parents[2] / "nv-models" / "tests" / "tiny_models.py"
SPEC = importlib.util.spec_from_file_location("tiny_models", TINY)
TINY_MODELS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TINY_MODELS)
INVARIANT = {"Qwen2", "Gemma3", "Mixtral", "GptOss"}
STEPS = 12


def run(engine, prompts):
    """The ids that prompts give when they run together, and how many tokens were cached."""
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    rows = {engine.add(EngineRequest(prompt, params)): [] for prompt in prompts}
    cached = dict.fromkeys(rows, 0)
    while engine.has_unfinished:
        for update in engine.step().updates:
            rows[update.request_id] += update.token_ids
            cached[update.request_id] = update.num_cached_tokens
    return list(rows.values()), list(cached.values())


@pytest.mark.parametrize("name", TINY_MODELS.CASES)
def test_alone_chunked_together_and_after_a_prefix_hit(tmp_path, name):
    folder = TINY_MODELS.write_tiny_model(tmp_path / name, name)
    first = TINY_MODELS.PROMPT
    prompts = [first, [*first[:48], 7, 8, 9], first[5:30]]
    engine = Engine(
        EngineConfig(
            model=str(folder), device="cpu", max_num_batched_tokens=16, max_num_seqs=4,
            kvcache_block_size=16, num_kvcache_blocks=32, deterministic=name in INVARIANT,
        )
    )  # fmt: skip
    try:
        alone = [run(engine, [prompt])[0][0] for prompt in prompts]
        engine.reset_prefix_cache()
        together, _ = run(engine, prompts)
        again, cached = run(engine, prompts)
    finally:
        engine.close()
    assert together == again == alone
    assert cached[0] >= 48
    logits = TINY_MODELS.transformers_logits(folder, first + alone[0])
    assert alone[0] == logits[len(first) - 1 : -1].argmax(1).tolist()
    assert torch.isfinite(logits).all()
