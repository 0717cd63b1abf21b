"""Captures between steps, on a card: the same tokens, and other work may wait for the device.

Marked gpu.
"""

import pytest
import torch
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from nv_engine.device import captured_steps

pytestmark = pytest.mark.gpu
LENGTHS = [(3 + 5 * number, 4 + 9 * number) for number in range(12)]  # prompt, tokens


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Captures begin early and are used early, so that short lists have many."""
    monkeypatch.setattr(captured_steps, "SHARED_COUNT", 1)
    monkeypatch.setattr(captured_steps, "STEPS_OF_A_CAPTURE", 4)


def engine_of(checkpoint, **options):
    """Deterministic, so that a token does not depend on the graph that its step runs in."""
    sizes = {"max_num_seqs": 16, "kvcache_block_size": 64, "num_kvcache_blocks": 200}
    kind = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    return Engine(EngineConfig(model=str(checkpoint), **kind | sizes | options))


def tokens_of(engine, step):
    """The tokens of two lists of many batch sizes; `step` returns updates."""
    found = []
    for _ in range(2):
        drawn = {
            engine.add(
                EngineRequest(
                    [(7 * i + size) % 300 + 5 for i in range(size)],
                    SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
                )
            ): []
            for size, count in LENGTHS
        }
        while engine.has_unfinished:
            for update in step():
                drawn[update.request_id].extend(update.token_ids)
        found += drawn.values()
    captured = engine.executor._runner._captured
    if captured is not None:
        assert len(captured.graphs.keys) > 6
        assert not captured.graphs.is_capturing
    engine.close()
    return found


@pytest.fixture(scope="module")
def expected(checkpoint):
    engine = engine_of(checkpoint, enforce_eager=True)
    return tokens_of(engine, lambda: engine.step().updates)


def advanced(engine):
    """The updates of a step after which a capture may be half done."""
    updates = list(engine.advance().updates)
    engine._scheduler.updates = []
    return updates


def test_captures_between_steps_change_no_token(checkpoint, expected):
    engine = engine_of(checkpoint)
    assert engine.executor._runner._captured is not None
    assert tokens_of(engine, lambda: advanced(engine)) == expected


def test_after_a_step_the_process_may_wait_for_the_device(checkpoint, expected):
    engine = engine_of(checkpoint)

    def step():
        updates = engine.step().updates
        torch.cuda.synchronize()
        return updates

    assert tokens_of(engine, step) == expected
