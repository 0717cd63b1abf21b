"""/v1/score and /v1/rerank: the values are those of `LLM.score`."""

import asyncio

import httpx
import numpy as np
import pytest
from nv_api import PoolingParams
from nv_api.server.protocol.errors import ErrorEnvelope
from nv_api.server.protocol.rerank import RerankResponse
from nv_api.server.protocol.score import ScoreResponse
from pooling_models import MAX_LEN, PoolingServer

QUERY = "which sea is wide?"
TEXTS = ["hello world", "a", "the sea is wide and deep", "STOP hello hello", "é日本"]
KINDS = ["embedder", "reranker"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<|im_end|>"


def truth(llm, first, second, **more):
    return [each.outputs.score for each in llm.score(first, second, use_tqdm=False, **more)]


def close(found, want):
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)


def scores(answer):
    return [each["score"] for each in answer["data"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("first", "second"),
    [(QUERY, TEXTS[0]), (QUERY, TEXTS), ([QUERY], TEXTS), (TEXTS, TEXTS[::-1])],
    ids=["1-1", "1-N", "[1]-N", "N-N"],
)
def test_scores_of_pairs(pooling, kind, path, first, second):
    served, llm = pooling(kind)
    response = served.post(path, {"text_1": first, "text_2": second, "model": "m/tiny"})
    answer = response.json()
    ScoreResponse.model_validate(answer)
    close(scores(answer), truth(llm, first, second))
    assert [each["index"] for each in answer["data"]] == [*range(len(answer["data"]))]
    assert {each["object"] for each in answer["data"]} == {"score"}
    assert answer["id"] == f"score-{response.headers['x-request-id']}"
    assert (answer["object"], answer["model"]) == ("list", "m/tiny")


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_the_other_names_of_texts(pooling, names):
    served, llm = pooling("reranker")
    answer = served.post("/v1/score", dict(zip(names, (QUERY, TEXTS), strict=True))).json()
    close(scores(answer), truth(llm, QUERY, TEXTS))


def test_usage_counts_each_prompt_once(pooling):
    served, llm = pooling("embedder")
    usage = served.post("/v1/score", {"text_1": QUERY, "text_2": TEXTS}).json()["usage"]
    prompts = [each.prompt_token_ids for each in llm.embed([QUERY, *TEXTS], use_tqdm=False)]
    assert usage["prompt_tokens"] == usage["total_tokens"] == sum(map(len, prompts))
    served, llm = pooling("reranker")
    usage = served.post("/v1/rerank", {"query": QUERY, "documents": TEXTS}).json()["usage"]
    pairs = [each.prompt_token_ids for each in llm.score(QUERY, TEXTS, use_tqdm=False)]
    assert usage["prompt_tokens"] == usage["total_tokens"] == sum(map(len, pairs))


@pytest.mark.parametrize(
    ("fields", "params"),
    [({"use_activation": False}, PoolingParams(use_activation=False)),
     ({"truncate_prompt_tokens": 4}, PoolingParams(truncate_prompt_tokens=4))],
)  # fmt: skip
def test_parameters_of_a_classifier_s_score(pooling, fields, params):
    served, llm = pooling("reranker")
    answer = served.post("/v1/score", {"text_1": QUERY, "text_2": TEXTS, **fields}).json()
    want = truth(llm, QUERY, TEXTS, pooling_params=params)
    close(scores(answer), want)
    assert np.abs(np.array(want) - truth(llm, QUERY, TEXTS)).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_sorted(pooling, kind, path):
    served, llm = pooling(kind)
    documents = [*TEXTS, {"text": TEXTS[1]}]
    response = served.post(path, {"query": QUERY, "documents": documents})
    answer = response.json()
    RerankResponse.model_validate(answer)
    want = truth(llm, QUERY, [*TEXTS, TEXTS[1]])
    found = [each["index"] for each in answer["results"]]
    assert sorted(found) == [*range(6)]
    assert found.index(5) == found.index(1) + 1  # equal scores keep their order
    close([each["relevance_score"] for each in answer["results"]], sorted(want, reverse=True))
    for each in answer["results"]:
        close(each["relevance_score"], want[each["index"]])
        assert each["document"] == {"text": [*TEXTS, TEXTS[1]][each["index"]]}
    assert answer["id"] == f"rerank-{response.headers['x-request-id']}"
    assert answer.keys() == {"id", "model", "results", "usage"}


@pytest.mark.parametrize(("top_n", "num"), [(None, 5), (0, 5), (2, 2), (9, 5)])
def test_top_n_and_results_without_documents(pooling, top_n, num):
    served, llm = pooling("reranker")
    body = {"query": QUERY, "documents": TEXTS, "top_n": top_n, "return_documents": False}
    results = served.post("/v1/rerank", body).json()["results"]
    want = sorted(truth(llm, QUERY, TEXTS), reverse=True)[:num]
    close([each["relevance_score"] for each in results], want)
    assert all(each.keys() == {"index", "relevance_score"} for each in results)


WRONG = [
    ("/v1/score", {"text_1": "a"}, "text_2"),
    ("/v1/score", {"text_2": "a"}, "text_1"),
    ("/v1/score", {}, "text_1"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "data_1": "c"}, "text_1"),
    ("/v1/score", {"queries": "a", "text_2": "b"}, "text_1"),
    ("/v1/score", {"text_1": "", "text_2": "b"}, "text_1"),
    ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2.1"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/v1/score", {"text_1": "a", "text_2": [5]}, "text_2.0"),
    ("/v1/score", {"text_1": "a", "text_2": {"image": "b"}}, "text_2"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
    ("/v1/score", {"queries": ["a", "b"], "items": "c"}, "queries"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "priority": 1}, "priority"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "use_activation": 1}, "use_activation"),
    ("/v1/rerank", {"query": "a"}, "documents"),
    ("/v1/rerank", {"documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": 5, "documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": None, "documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": {"x": "a"}, "documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["b", None]}, "documents.1"),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c" * 60]}, "documents.1"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": "2"}, "top_n"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "return_documents": 1}, "return_documents"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0},
     "truncate_prompt_tokens"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "model": 4}, "model"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("path", "body", "param"), WRONG)
def test_a_wrong_field_is_named_and_nothing_is_run(pooling, kind, path, body, param):
    served, _ = pooling(kind)
    before = served.work
    response = served.post(path, body)
    assert response.status_code == 400, response.text
    ErrorEnvelope.model_validate(response.json())
    error = response.json()["error"]
    assert error["param"] == param, error
    assert param in error["message"]
    assert served.work == before


def test_a_text_of_a_pair_that_is_too_long_is_named(pooling):
    served, _ = pooling("embedder")
    long = "c" * MAX_LEN
    for body, param in (
        ({"text_1": long, "text_2": ["a", "b"]}, "text_1"),
        ({"text_1": "a", "text_2": ["b", long]}, "text_2.1"),
        ({"text_1": ["a", "b"], "text_2": ["b", long]}, "text_2.1"),
    ):
        error = served.post("/v1/score", body).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert f"{param} has {MAX_LEN + 1} tokens" in error["message"]
    served, _ = pooling("reranker")
    for body, param in (
        ({"text_1": "a", "text_2": long}, "text_2"),
        ({"text_1": "a", "text_2": ["b", long]}, "text_2.1"),
    ):
        error = served.post("/v1/score", body).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert f"{param} with its text_1 has {MAX_LEN + 2} tokens" in error["message"]


def test_a_model_of_three_labels_makes_no_scores(pooling):
    served, _ = pooling("classifier")
    for path, body in (
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    ):
        response = served.post(path, body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "unsupported"
        assert "this route needs embed or score: use /classify and /pooling" in error["message"]


def test_the_server_s_template_makes_the_prompt_of_a_pair(pooling):
    served, llm = pooling("reranker")
    other = PoolingServer(served.folder, chat_template=TEMPLATE)
    try:
        answer = other.post("/v1/score", {"text_1": "ab", "text_2": TEXTS[:2]}).json()
    finally:
        other.close()
    want = truth(llm, "ab", TEXTS[:2], chat_template=TEMPLATE)
    close(scores(answer), want)
    assert np.abs(np.array(want) - truth(llm, "ab", TEXTS[:2])).max() > 1e-3


def test_many_clients_at_once_get_their_own(pooling):
    served, llm = pooling("reranker")
    lists = [[f"text {i} {j}" for j in range(1 + i % 4)] for i in range(12)]

    async def main():
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            return await asyncio.gather(
                *(client.post("/rerank", json={"query": QUERY, "documents": d}) for d in lists)
            )

    for documents, response in zip(lists, asyncio.run(main()), strict=True):
        want = truth(llm, QUERY, documents)
        for each in response.json()["results"]:
            close(each["relevance_score"], want[each["index"]])
            assert each["document"]["text"] == documents[each["index"]]
