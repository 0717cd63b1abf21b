"""POST /classify and /pooling: the values are those of `LLM`."""

import base64
import struct

import numpy as np
import pytest
from nv_api import PoolingParams
from nv_api.server.protocol.classify import ClassifyResponse
from nv_api.server.protocol.pooling import PoolingResponse
from pooling_models import WIDTH

TEXTS = ["hello world", "a", "the sea is wide and deep", "STOP hello hello", "é日本"]
LABELS = ["joy", "fear", "anger"]
MESSAGES = [{"role": "user", "content": "ab"}]


def close(found, want):
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "params"),
    [({}, None), ({"use_activation": False}, PoolingParams(use_activation=False)),
     ({"truncate_prompt_tokens": 2}, PoolingParams(truncate_prompt_tokens=2))],
)  # fmt: skip
def test_classes_have_labels(pooling, fields, params):
    served, llm = pooling("classifier")
    response = served.post("/classify", {"input": TEXTS, **fields})
    ClassifyResponse.model_validate(response.json())
    answer = response.json()
    outputs = llm.classify(TEXTS, params, use_tqdm=False)
    for index, (item, output) in enumerate(zip(answer["data"], outputs, strict=True)):
        close(item["probs"], output.outputs.probs)
        assert item["label"] == LABELS[int(np.argmax(output.outputs.probs))]
        assert (item["index"], item["num_classes"]) == (index, 3)
    assert len({item["label"] for item in answer["data"]}) > 1
    assert answer["id"] == f"classify-{response.headers['x-request-id']}"
    num_tokens = sum(len(each.prompt_token_ids) for each in outputs)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens


def test_a_label_without_a_name_and_a_conversation(pooling, byte_level):
    served, llm = pooling("reranker")
    answer = served.post("/classify", {"messages": MESSAGES}).json()
    (item,) = answer["data"]
    text = byte_level.apply_chat_template(MESSAGES, tokenize=False)
    ids = byte_level(text, add_special_tokens=False)["input_ids"]
    (output,) = llm.classify([ids], use_tqdm=False)
    close(item["probs"], output.outputs.probs)
    assert item["label"] == "LABEL_0"


@pytest.mark.parametrize(
    ("kind", "task", "params"),
    [("embedder", None, {}), ("embedder", "token_embed", {"dimensions": 4}),
     ("embedder", "embed", {}), ("embedder", "embed", {"use_activation": False}),
     ("classifier", None, {}), ("classifier", "token_classify", {"use_activation": False}),
     ("classifier", "classify", {})],
)  # fmt: skip
def test_every_task_of_pooling_in_both_encodings(pooling, kind, task, params):
    served, llm = pooling(kind)
    body = {"input": TEXTS, **params} | ({"task": task} if task else {})
    answer = served.post("/pooling", body).json()
    PoolingResponse.model_validate(answer)
    default = {"embedder": "token_embed", "classifier": "token_classify"}[kind]
    outputs = llm.encode(TEXTS, PoolingParams(**params), False, None, task or default)
    coded = served.post("/pooling", {**body, "encoding_format": "base64"}).json()
    for item, text, output in zip(answer["data"], coded["data"], outputs, strict=True):
        want = output.outputs.data.numpy()
        assert np.shape(item["data"]) == want.shape
        close(item["data"], want)
        raw = base64.b64decode(text["data"])
        numbers = struct.unpack(f"<{len(raw) // 4}f", raw)
        close(numbers, np.ravel(item["data"]))  # another run: the head's last bits may differ
    assert answer["object"] == "list"
    assert {item["object"] for item in answer["data"]} == {"pooling"}


@pytest.mark.parametrize(
    ("kind", "path", "fields", "param", "words"),
    [
        ("embedder", "/classify", {}, None, "has embed and token_embed, and this route needs clas"),
        ("embedder", "/pooling", {"task": "classify"}, "task", "this model has embed, token_embed"),
        ("classifier", "/v1/embeddings", {}, None, "this route needs embed: use /classify and /p"),
        ("classifier", "/pooling", {"task": "score"}, "task", "it must be 'embed', 'classify'"),
        ("classifier", "/pooling", {"dimensions": 2}, "dimensions", "are not embeddings"),
        ("classifier", "/pooling", {"input": ""}, "input", "is empty"),
        ("classifier", "/classify", {"input": [5, 400]}, "input", "token id 400"),
        ("embedder", "/pooling", {"dimensions": WIDTH + 1}, "dimensions", f"1 to {WIDTH}"),
        ("classifier", "/classify", {"normalize": 3}, "normalize", "normalize is 3"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_run(pooling, kind, path, fields, param, words):
    served, _ = pooling(kind)
    before = served.work
    response = served.post(path, {"input": "a", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["code"] == (None if param else "unsupported")
    assert served.work == before
