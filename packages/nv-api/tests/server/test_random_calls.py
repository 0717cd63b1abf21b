"""Random requests whose tool calls are required or named: stream, plain answer and `LLM` agree.

`LLM` knows nothing of calls: it gets the grammar that the server makes of them, and must say the
same tokens. `NV_RANDOM_REQUESTS` and `NV_RANDOM_SEED` are as in `test_random_requests.py`.
"""

import asyncio
import json
import os
import random
import re

import nv_api.async_llm
import pytest
from joining import joined_chat, plain_chat
from nv_api import SamplingParams, StructuredOutputsParams
from nv_api.said import Function, Place
from nv_api.said.forms import Tags, calls_form, grammar
from nv_api.said.hermes import HermesCall
from nv_api.said.qwen3_coder import Qwen3CoderCall
from scripted_device import HostThread

pytestmark = pytest.mark.slow

NUM_REQUESTS = int(os.environ.get("NV_RANDOM_REQUESTS", "40")) // 4
SEED = int(os.environ.get("NV_RANDOM_SEED", "18"))
OPTIONS = {
    "device": "cpu", "dtype": "float32", "deterministic": True, "max_model_len": 512,
    "kvcache_block_size": 16, "num_kvcache_blocks": 400, "max_num_seqs": 32,
}  # fmt: skip
DIALECTS = {"hermes": HermesCall, "qwen3_coder": Qwen3CoderCall}
PROPERTIES = {
    "sky": {"enum": ["clear", "cloudy", 'a "quoted" one', "日本"]},
    "degrees": {"type": "integer", "minimum": -9, "maximum": 99},
    "dry": {"type": "boolean"},
    "hours": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
    "where": {"type": "string"},
}


def a_function(rng, index):
    """A function, with or without parameters."""
    function = {"name": rng.choice(["look", "see", "find_me"]) + str(index)}
    if rng.random() < 0.8:
        names = rng.sample([*PROPERTIES], rng.randint(1, 3))
        function["parameters"] = {
            "type": "object",
            "properties": {name: PROPERTIES[name] for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    return function


def a_request(dialect, number):
    """The body of a request, its functions that may be called, and how many calls it has."""
    rng = random.Random(f"{SEED} {dialect} {number}")
    functions = [a_function(rng, index) for index in range(rng.randint(1, 3))]
    body = {
        "messages": [{"role": "user", "content": rng.choice(["hello", "日本 <tool_call>", "{"])}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": "required",
        "max_tokens": rng.choice([3, 20, 200, 200]),
        "seed": rng.randint(-(2**63), 2**63),
        "n": rng.choice([1, 1, 3]),
        "return_token_ids": True,
    }
    num_calls = "+"
    if rng.random() < 0.4:
        functions = [rng.choice(functions)]
        name = {"name": functions[0]["name"]}
        body["tool_choice"] = {"type": "function", "function": name}
        num_calls = ""
    elif rng.random() < 0.4:
        body["parallel_tool_calls"] = False
        num_calls = ""
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": 2}
    return body, functions, num_calls


def expected(llm, dialect, number):
    """LLM's completions, under the grammar of the calls."""
    body, functions, num_calls = a_request(dialect, number)
    tags = Tags(llm.get_tokenizer().get_added_vocab())
    form = calls_form(
        DIALECTS[dialect],
        [Function(each["name"], each.get("parameters")) for each in functions],
        tags,
        num_calls=num_calls,
    )
    params = SamplingParams(
        n=body["n"], seed=body["seed"], max_tokens=body["max_tokens"],
        structured_outputs=StructuredOutputsParams(grammar=grammar(form, Place.AFTER, tags)),
    )  # fmt: skip
    outputs = llm.chat([body["messages"]], params, use_tqdm=False, tools=body["tools"])
    return outputs[0].outputs


@pytest.fixture(scope="module", params=[*DIALECTS])
def dialect(request):
    return request.param


@pytest.fixture(scope="module")
def answers(served_answers, dialect):
    """The server's answers: each request plain and streamed, all at once."""

    async def ask_all(client):
        posts = [
            client.post("/v1/chat/completions", json={**a_request(dialect, i)[0], **more})
            for i in range(NUM_REQUESTS)
            for more in ({}, {"stream": True})
        ]
        return await asyncio.gather(*posts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nv_api.async_llm, "HostProcess", lambda: HostThread(None))
        return served_answers(
            ask_all, generation_config="nv", reasoning_parser="none", tool_call_parser=dialect
        )


def check_calls(choice, output, functions, *, is_named):
    """The calls are those of the text: they have the names and the arguments of a schema."""
    is_whole = output.finish_reason == "stop"
    assert choice["finish_reason"] == (
        "length" if not is_whole else "stop" if is_named else "tool_calls"
    )
    assert not choice["content"]
    assert len(choice["calls"]) == len(re.findall("</tool_call>", output.text)) or not is_whole
    known = {each["name"]: each.get("parameters", {}) for each in functions}
    for call in choice["calls"] if is_whole else ():
        given, schema = json.loads(call["arguments"]), known[call["name"]]
        assert given.keys() <= schema.get("properties", {}).keys()
        assert given.keys() >= set(schema.get("required", ()))


@pytest.mark.parametrize("number", range(NUM_REQUESTS))
def test_forced_calls_streamed_plain_and_of_llm_are_equal(answers, llm, dialect, number):
    body, functions, _ = a_request(dialect, number)
    plain, stream = answers[2 * number : 2 * number + 2]
    try:
        assert plain.status_code == 200, plain.text
        choices = plain_chat(plain.json())
        events = [part.removeprefix("data: ") for part in stream.text.split("\n\n")[:-2]]
        assert joined_chat([json.loads(each) for each in events]) == choices
        outputs = expected(llm, dialect, number)
        assert [choice["ids"] for choice in choices] == [each.token_ids for each in outputs]
        for choice, output in zip(choices, outputs, strict=True):
            is_named = isinstance(body["tool_choice"], dict)
            check_calls(choice, output, functions, is_named=is_named)
    except AssertionError as error:
        error.add_note(f"seed {SEED}, {dialect}, request {number}: {json.dumps(body)}")
        raise
