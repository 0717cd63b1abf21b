"""Several ranks give the tokens of one."""

import os
import signal
from functools import partial

import pytest
import rank_workers
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from nv_engine.executor.process import ProcessExecutor

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(seed=5, temperature=0.8, top_k=50, max_tokens=24, ignore_eos=True)
PROMPTS = [
    [(7 * row + 3 * position) % 300 + 5 for position in range(length)]
    for row, length in enumerate((255, 300, 400))
]
BLOCK_BYTES = 2 * 16 * 64 * 4 * 2  # K and V, tokens, one KV head, fp32, two layers


def config_of(checkpoint, **options):
    settings = {"kvcache_block_size": 16, "device": "cpu", "max_num_seqs": 8}
    return EngineConfig(model=str(checkpoint), **{**settings, **options})


def completions(*engines, params=GREEDY, prompts=PROMPTS):
    """Each engine's completions of the prompts, while all of them run by turns."""
    tokens = [{} for _ in engines]
    for engine, own in zip(engines, tokens, strict=True):
        for prompt in prompts:
            own[engine.add(EngineRequest(prompt, params))] = []
    while any(engine.has_unfinished for engine in engines):
        for engine, own in zip(engines, tokens, strict=True):
            for update in engine.step().updates:
                assert update.finish_reason in (None, "length"), update.stop_reason
                own[update.request_id] += update.token_ids
    return [list(own.values()) for own in tokens]


@pytest.fixture(scope="module")
def one_rank(checkpoint):
    engine = Engine(config_of(checkpoint))
    runs = {"greedy": GREEDY, "drawn": DRAWN}
    yield {name: completions(engine, params=params)[0] for name, params in runs.items()}
    engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_n46_two_ranks_with_less_memory_on_one(checkpoint, one_rank, tmp_path):
    config = config_of(checkpoint, tensor_parallel_size=2)
    memory = [2**30, 38 * BLOCK_BYTES * 4 * 2]  # the pool is a quarter, of which each has half
    executor = ProcessExecutor(config, partial(rank_workers.record, str(tmp_path), memory))
    engine = Engine(config, executor)
    assert engine.facts.num_blocks == 38
    assert completions(engine) == [one_rank["greedy"]]
    assert completions(engine, params=DRAWN) == [one_rank["drawn"]]
    for prompt in ([5, 320], [5, -1]):
        with pytest.raises(ValueError, match=r"token id (320|-1)"):
            engine.add(EngineRequest(prompt, GREEDY))  # N13
    with pytest.raises(ValueError, match="logit_bias has token id 320"):
        engine.add(EngineRequest([5], SamplingParams(logit_bias={320: 1.0})))
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.add(EngineRequest([5], GREEDY))
    drawn = [(tmp_path / f"ids.{rank}").read_text() for rank in range(2)]
    assert drawn[0] == drawn[1] != ""


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_four_ranks_then_one_less(checkpoint, one_rank):
    """Two KV heads on four ranks: each has two holders. Then a rank is killed."""
    engine = Engine(config_of(checkpoint, tensor_parallel_size=4))
    assert completions(engine) == [one_rank["greedy"]]
    ids = [engine.add(EngineRequest(prompt, GREEDY)) for prompt in PROMPTS]
    engine.step()
    engine.step()
    os.kill(engine.executor.process_ids[2], signal.SIGKILL)
    ended = {}
    while engine.has_unfinished:
        for update in engine.step().updates:
            if update.finish_reason:
                ended[update.request_id] = update.finish_reason, update.stop_reason
    assert set(ended) == set(ids)
    for reason, text in ended.values():
        assert reason == "error"
        assert "rank 2 of 4" in text
        assert "killed by SIGKILL" in text
    engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_two_engines_at_once(checkpoint, one_rank):
    engines = [Engine(config_of(checkpoint, tensor_parallel_size=2)) for _ in range(2)]
    assert completions(*engines) == [one_rank["greedy"]] * 2
    engines[0].close()
    assert completions(engines[1]) == [one_rank["greedy"]]
    engines[1].close()


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_ctrl_c_in_the_middle_of_a_step(checkpoint, one_rank):
    config = config_of(checkpoint, tensor_parallel_size=2, max_in_flight=0)
    engine = Engine(config, ProcessExecutor(config, rank_workers.interrupt))
    tokens = {engine.add(EngineRequest(prompt, GREEDY)): [] for prompt in PROMPTS}
    num_interrupts = 0
    while engine.has_unfinished:
        try:
            output = engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            continue
        for update in output.updates:
            tokens[update.request_id] += update.token_ids
    assert num_interrupts == 2
    assert list(tokens.values()) == one_rank["greedy"]
    engine.close()


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize(("size", "what"), [(3, "num_attention_heads"), (8, "num_attention_heads")])
def test_a_size_that_does_not_divide_starts_nothing(checkpoint, size, what, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(ValueError, match=f"tensor_parallel_size {size} .* {what} = 4"):
        Engine(config_of(checkpoint, tensor_parallel_size=size))
