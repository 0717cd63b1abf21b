"""lm-eval's local-completions: its log-likelihoods are those of `LLM` on the same token ids."""

import json
import subprocess

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " Lyon, and that is a longer continuation"),
    ("1 + 1 =", " 2"),
    ("日本の首都は", "東京です 🙂"),
    ("a" * 600, "b" * 300),
]
LIKELIHOODS = """
import json, sys
from nv_api import LLM, SamplingParams
model, pairs = json.load(sys.stdin)
with LLM(model, device="cpu", dtype="float32", max_model_len=1024, max_num_seqs=32,
         num_kvcache_blocks=256, kvcache_block_size=256) as llm:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    encode = llm.get_tokenizer().encode
    pairs = [(encode(before), encode(after)) for before, after in pairs]
    ids = [before + after for before, after in pairs]
    outputs = llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
    found = []
    for (before, after), output in zip(pairs, outputs):
        positions = output.prompt_logprobs[len(before):]
        own = [position[token] for token, position in zip(after, positions, strict=True)]
        is_greedy = all(each.logprob == max(other.logprob for other in position.values())
                        for each, position in zip(own, positions))
        found.append([sum(each.logprob for each in own), is_greedy])
print(json.dumps(found))
"""
"""Run by the server's Python."""


@pytest.fixture(scope="module")
def model(served):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", served.key)
        yield LocalCompletionsAPI(
            base_url=f"{served.v1}/completions",
            model=served.model,
            tokenizer_backend="remote",
            auth_token=served.key,
            batch_size=4,
            max_length=1024,
            max_retries=1,
        )


def test_log_likelihoods_are_those_of_llm(model, served):
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index)
        for index, pair in enumerate(PAIRS)
    ]
    found = model.loglikelihood(requests, disable_tqdm=True)
    result = subprocess.run(
        [served.python, "-c", LIKELIHOODS],
        input=json.dumps([str(served.folder), PAIRS]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert [[*each] for each in found] == json.loads(result.stdout.splitlines()[-1])
