"""Two ranks on two cards, over NCCL: the tokens of one card, and an end when a rank dies."""

import os
import signal
import time

import pytest
import rank_workers
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from nv_engine.batch import Batch, Chunk
from nv_engine.executor.parallel import Patience
from nv_engine.executor.process import ProcessExecutor

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(seed=5, temperature=0.8, top_k=50, max_tokens=24, ignore_eos=True)
PROMPTS = [
    [(7 * row + 3 * position) % 300 + 5 for position in range(length)]
    for row, length in enumerate((255, 30, 300, 64))
]


def start(checkpoint, **options):
    settings = {"kvcache_block_size": 64, "max_num_seqs": 8, "num_kvcache_blocks": 60}
    return Engine(EngineConfig(model=str(checkpoint), **{**settings, **options}))


def completions(engine, params):
    tokens = {engine.add(EngineRequest(prompt, params)): [] for prompt in PROMPTS}
    while engine.has_unfinished:
        for update in engine.step().updates:
            assert update.finish_reason in (None, "length"), update.stop_reason
            tokens[update.request_id] += update.token_ids
    return list(tokens.values())


def run(checkpoint, **options):
    engine = start(checkpoint, **options)
    found = [completions(engine, params) for params in (GREEDY, DRAWN, GREEDY)]
    engine.close()
    return found


def test_fp32_tokens_equal_one_card_s(checkpoint):
    assert run(checkpoint, dtype="float32", tensor_parallel_size=2) == run(
        checkpoint, dtype="float32"
    )


def test_graphs_with_collectives_give_the_tokens_of_eager_steps(checkpoint):
    options = {"dtype": "bfloat16", "tensor_parallel_size": 2}
    assert run(checkpoint, **options) == run(checkpoint, **options, enforce_eager=True)


def test_sums_inside_the_norm_are_the_library_s(checkpoint):
    config = EngineConfig(model=str(checkpoint), tensor_parallel_size=2)
    executor = ProcessExecutor(config, rank_workers.sum_in_norm)
    batch = Batch((Chunk(0, 0, 1, (1,), samples=True),))
    ((in_sums, in_norms, num_rows),) = executor.submit(batch).result().token_ids
    executor.close()
    assert (in_sums, in_norms) == (0, 0)
    summing = rank_workers.Summing
    assert num_rows == sum(summing.heights) + 2 * 16 * summing.num_replays


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_sums_inside_the_norm_leave_log_probabilities_as_they_are(checkpoint, options):
    """Against sums that the library makes, within bf16's rounding."""
    settings = dict(options)
    found = []
    for disabled in (True, False):
        settings["disable_custom_all_reduce"] = disabled
        engine = start(checkpoint, dtype="bfloat16", tensor_parallel_size=2, **settings)
        first_logprobs(engine)
        found.append(first_logprobs(engine))  # from a graph, where there are graphs
        engine.close()
    for library, norm in zip(*found, strict=True):
        assert norm == pytest.approx(library, abs=0.05)


def first_logprobs(engine):
    """Of each prompt's most likely next token."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    for prompt in PROMPTS:
        engine.add(EngineRequest(prompt[:20], params))  # together few enough tokens
    updates = []
    while engine.has_unfinished:
        updates += engine.step().updates
    updates.sort(key=lambda update: update.request_id)
    return [entry.logprobs[0] for update in updates for entry in update.logprobs]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_ends_what_ran(checkpoint, rank):
    """The other's card waits in a graph for its part of a sum."""
    engine = start(checkpoint, dtype="bfloat16", tensor_parallel_size=2)
    completions(engine, GREEDY)
    for prompt in PROMPTS:
        engine.add(EngineRequest(prompt, GREEDY))
    engine.step()
    engine.step()
    os.kill(engine.executor.process_ids[rank], signal.SIGKILL)
    begin, reasons = time.monotonic(), []
    while engine.has_unfinished:
        reasons += [u.stop_reason for u in engine.step().updates if u.finish_reason == "error"]
    assert time.monotonic() - begin < 10
    assert len(reasons) == len(PROMPTS)
    assert all(f"rank {rank} of 2" in reason for reason in reasons)
    engine.close()
    assert time.monotonic() - begin < 20


def test_a_stopped_rank_is_named_and_the_card_is_free_again(checkpoint):
    """Nothing waits on the card for the rank's part of a sum: another engine runs there."""
    config = EngineConfig(
        model=str(checkpoint),
        dtype="float32",
        kvcache_block_size=64,
        max_num_seqs=8,
        num_kvcache_blocks=60,
        tensor_parallel_size=2,
    )
    engine = Engine(config, ProcessExecutor(config, patience=Patience(silence=2)))
    expected = completions(engine, GREEDY)
    os.kill(engine.executor.process_ids[1], signal.SIGSTOP)
    for prompt in PROMPTS:
        engine.add(EngineRequest(prompt, GREEDY))
    begin, reasons = time.monotonic(), []
    while engine.has_unfinished:
        reasons += [u.stop_reason for u in engine.step().updates if u.finish_reason == "error"]
    assert time.monotonic() - begin < 10
    assert len(reasons) == len(PROMPTS)
    assert all("rank 1 of 2" in reason and "not answered" in reason for reason in reasons)
    engine.close()
    alone = start(checkpoint, dtype="float32")
    assert completions(alone, GREEDY) == expected
    alone.close()
