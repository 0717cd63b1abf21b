"""In bf16 two ranks round as often as one: their partial sums cost no exactness worth a name."""

import pytest
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams

NUM_LOGPROBS = 320  # the vocabulary
PROMPTS = [[(11 * row + 7 * i) % 300 + 5 for i in range(3 + row)] for row in range(30)]


def next_logprobs(checkpoint, **options):
    """Log-probabilities of all tokens after each prompt."""
    engine = Engine(EngineConfig(model=str(checkpoint), device="cpu", max_num_seqs=8, **options))
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=NUM_LOGPROBS)
    found = {engine.add(EngineRequest(prompt, params)): {} for prompt in PROMPTS}
    while engine.has_unfinished:
        for update in engine.step().updates:
            (entry,) = update.logprobs
            found[update.request_id] = dict(zip(entry.token_ids, entry.logprobs, strict=True))
    engine.close()
    return list(found.values())


def mean_difference(left, right):
    differences = [
        abs(a[token] - b[token]) for a, b in zip(left, right, strict=True) for token in a
    ]
    return sum(differences) / len(differences)


@pytest.mark.slow
def test_bf16_on_two_ranks_is_as_near_to_fp32_as_on_one(checkpoint):
    exact = next_logprobs(checkpoint, dtype="float32")
    one = next_logprobs(checkpoint, dtype="bfloat16")
    two = next_logprobs(checkpoint, dtype="bfloat16", tensor_parallel_size=2)
    assert mean_difference(one, exact) > 0
    assert mean_difference(two, exact) < 1.2 * mean_difference(one, exact)
    assert mean_difference(two, one) > 0, "they round differently, or the comparison is of one"
