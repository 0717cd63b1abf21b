"""Random requests: a joined stream, the plain answer and `LLM`'s are equal, to the last bit.

A tiny checkpoint in float32 on a CPU, in deterministic mode, so that neighbours change nothing.
`NV_RANDOM_REQUESTS` is how many requests there are, and `NV_RANDOM_SEED` chooses others; a failure
shows the seed, the request's number and its body.
"""

import asyncio
import json
import math
import os
import random

import pytest
from nv_api import SamplingParams, StructuredOutputsParams
from nv_api.said import Place
from nv_api.said.forms import Tags, grammar, json_form

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*ended with finish_reason 'error'"),  # they are compared
]

NUM_REQUESTS = int(os.environ.get("NV_RANDOM_REQUESTS", "40"))
SEED = int(os.environ.get("NV_RANDOM_SEED", "18"))
AT_ONCE = 6
MAX_MODEL_LEN = 128
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "deterministic": True,
    "max_model_len": MAX_MODEL_LEN,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 400,
    "max_num_seqs": 32,
}
TEXTS = ["hello world", "a", "日本 hello", "STOP and go", "é🙂 <think>", "{", "hello hello hello"]
STOPS = ["a", "e", "hello", "STOP", "lo", "\n", "é", "ST", "o w", "ab", "1"]
BAD_WORDS = ["hello", "a", " w", "STOP", "b c"]
REGEXES = ["([a-f]{2}[0-9]){2,6}", "[a-z]+", "(yes|no)(, (yes|no)){0,3}"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NOT_OF_THE_ENGINE = {"structured_outputs", "response_format", "logit_bias"}
"""Fields that a request spells in another way than SamplingParams."""


def sampling_fields(rng):
    """Fields of SamplingParams, as JSON has them."""
    fields = {"temperature": 0} if rng.random() < 0.2 else {"seed": rng.randint(-(2**63), 2**63)}
    if "seed" in fields and rng.random() < 0.8:
        fields["temperature"] = rng.choice([0.3, 0.8, 1.0, 1.5, 2])
    choices = {
        "n": lambda: rng.randint(1, 3),
        "top_p": lambda: rng.uniform(0.3, 1),
        "top_k": lambda: rng.choice([-1, 0, 1, 5, 50]),
        "min_p": lambda: rng.uniform(0, 0.9),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.uniform(0.8, 1.5),
        "logit_bias": lambda: {str(rng.randrange(264)): rng.uniform(-9, 9) for _ in range(4)},
        "max_tokens": lambda: rng.choice([1, 2, 7, 20, 40, 1000]),
        "stop": lambda: rng.choice([rng.choice(STOPS), rng.sample(STOPS, 3)]),
        "stop_token_ids": lambda: [rng.randrange(264) for _ in range(12)],
        "include_stop_str_in_output": lambda: True,
        "ignore_eos": lambda: True,
        "bad_words": lambda: rng.sample(BAD_WORDS, 2),
        "allowed_token_ids": lambda: [*range(50, 100), 256],
        "skip_special_tokens": lambda: False,
        "spaces_between_special_tokens": lambda: False,
    }
    fields |= {name: make() for name, make in choices.items() if rng.random() < 0.25}
    if rng.random() < 0.2 and fields.get("max_tokens", 0) != 1:
        fields["min_tokens"] = rng.randint(1, min(fields.get("max_tokens", 9), 9))
    if rng.random() < 0.2:
        fields.pop("allowed_token_ids", None)  # with both, often no token is left
        fields["structured_outputs"] = rng.choice(
            [{"choice": ["yes", "no", "hello"]}, {"regex": rng.choice(REGEXES)}, {"json": SCHEMA}]
        )
    return fields


def common_fields(rng):
    """Fields that change what an answer shows."""
    fields = {}
    if rng.random() < 0.5:
        fields["return_token_ids"] = True
    if rng.random() < 0.3:
        fields["cache_salt"] = rng.choice("xy")
    if rng.random() < 0.2:
        fields["return_tokens_as_token_ids"] = True
    if rng.random() < 0.3:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return fields


def a_prompt(rng):
    if rng.random() < 0.5:
        return "".join(rng.sample(TEXTS, rng.randint(1, 3)))
    return [rng.randrange(256) for _ in range(rng.randint(1, 40))]


def completion_body(rng):
    body = {"prompt": a_prompt(rng)} | sampling_fields(rng) | common_fields(rng)
    if rng.random() < 0.3:
        kind = type(body["prompt"])
        body["prompt"] = [
            prompt for prompt in (a_prompt(rng) for _ in range(6)) if type(prompt) is kind
        ] or [body["prompt"]]
    if rng.random() < 0.5:
        body["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.3:
        body["echo"] = True
    if body.get("echo") and rng.random() < 0.2:
        body |= {"max_tokens": 0, "min_tokens": 0}
    return body


def chat_body(rng):
    messages = [{"role": "user", "content": rng.choice(TEXTS)} for _ in range(rng.randint(1, 2))]
    body = {"messages": messages} | sampling_fields(rng) | common_fields(rng)
    if rng.random() < 0.5:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    if rng.random() < 0.2:
        body["tools"] = [TOOL]
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    if body.get("structured_outputs", {}).get("json") and rng.random() < 0.5:
        del body["structured_outputs"]
        form = {"name": "s", "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body


def a_request(number):
    """The route and the body of a request."""
    rng = random.Random(f"{SEED} {number}")
    if rng.random() < 0.5:
        return "/v1/completions", completion_body(rng)
    return "/v1/chat/completions", chat_body(rng)


# What LLM answers, in OpenAI's shapes.


def is_chat(body):
    return "messages" in body


def prompts_of(body):
    """The prompts of a completion's body, as a list."""
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]


def params_of(body, defaults):
    """The parameters that `LLM` gets for a body."""
    known = vars(SamplingParams())
    given = {k: v for k, v in body.items() if k in known and k not in NOT_OF_THE_ENGINE}
    if is_chat(body):
        given.setdefault("max_tokens", None)
        given["logprobs"] = body["top_logprobs"] if body.get("logprobs") else None
    elif body.get("echo") and body.get("max_tokens") == 0:
        given["max_tokens"] = 1
    if body.get("echo") and body.get("logprobs") is not None:
        given["prompt_logprobs"] = body["logprobs"]
    if "logit_bias" in body:
        given["logit_bias"] = {int(key): bias for key, bias in body["logit_bias"].items()}
    form = body.get("structured_outputs")
    if "response_format" in body:
        form = {"grammar": grammar(json_form(SCHEMA), Place.AFTER, Tags())}  # bounded white space
    params = defaults.clone()
    params.max_tokens = 16
    for name, value in given.items():
        setattr(params, name, value)
    if form is not None:
        params.structured_outputs = StructuredOutputsParams(**form)
    return params


def outputs_of(llm, body):
    """LLM's outputs, one for each prompt."""
    params = params_of(body, llm.get_default_sampling_params())
    if is_chat(body):
        more = {name: body[name] for name in ("tools", "chat_template_kwargs") if name in body}
        return llm.chat([body["messages"]], params, use_tqdm=False, **more)
    prompts = [each if isinstance(each, str) else list(each) for each in prompts_of(body)]
    return llm.generate(prompts, params, use_tqdm=False)


def named(candidates, body):
    """Candidates by name, in their order; of those with one name, the likeliest."""
    found = {}
    for token_id, each in candidates.items():
        as_id = body.get("return_tokens_as_token_ids")
        name = f"token_id:{token_id}" if as_id else each.decoded_token
        value = each.logprob if math.isfinite(each.logprob) else -9999.0
        found[name] = max(value, found.get(name, -math.inf))
    return found


def completion_choice(llm, body, request, output):
    """The choice of /v1/completions that is LLM's output."""
    is_only_echo = body.get("max_tokens") == 0
    choice = {
        "text": "" if is_only_echo else output.text,
        "token_ids": [] if is_only_echo else output.token_ids,
        "finish_reason": "length" if is_only_echo else output.finish_reason,
        "stop_reason": None if is_only_echo else output.stop_reason,
        "prompt_token_ids": request.prompt_token_ids,
    }
    columns = [] if is_only_echo else output.logprobs or []
    if body.get("echo"):
        prompt = request.prompt
        if prompt is None:
            prompt = llm.get_tokenizer().decode(
                request.prompt_token_ids,
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        choice["text"] = prompt + choice["text"]
        columns = [*(request.prompt_logprobs or []), *columns]
    if body.get("logprobs") is not None:
        choice["token_logprobs"] = [
            None if each is None else next(iter(each.values())).logprob for each in columns
        ]
        choice["top_logprobs"] = [None if each is None else named(each, body) for each in columns]
    return choice


def chat_choice(body, request, output):
    """The choice of /v1/chat/completions that is LLM's output."""
    choice = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "prompt_token_ids": request.prompt_token_ids,
    }
    if body.get("logprobs"):
        choice["logprobs"] = [
            next(iter(each.values())).logprob if each else None for each in output.logprobs
        ]
        choice["top_logprobs"] = [
            sorted(
                (each.logprob if math.isfinite(each.logprob) else -9999.0 for each in c.values()),
                reverse=True,
            )[: body["top_logprobs"]]
            for c in output.logprobs
        ]
    return choice


def expected_choices(llm, body):
    """The answers of LLM; None if it refuses the request, an error's sentence if one fails."""
    try:
        requests = outputs_of(llm, body)
    except ValueError:
        return None
    outputs = [(request, output) for request in requests for output in request.outputs]
    for _, output in outputs:
        if output.finish_reason == "error":
            return output.stop_reason
    if is_chat(body):
        return [chat_choice(body, *each) for each in outputs]
    return [completion_choice(llm, body, *each) for each in outputs]


# What the server answers, cut down to the same.


def shown(body, choice, answer):
    """The fields that a choice of a plain answer and LLM's have in common."""
    found = {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    if body.get("return_token_ids"):
        where = answer if is_chat(body) else choice
        found["token_ids"] = choice["token_ids"]
        found["prompt_token_ids"] = where["prompt_token_ids"]
    if not is_chat(body):
        found["text"] = choice["text"]
        if body.get("logprobs") is not None:
            found["token_logprobs"] = choice["logprobs"]["token_logprobs"]
            found["top_logprobs"] = choice["logprobs"]["top_logprobs"]
        return found
    message = choice["message"]
    found["text"] = message["content"]
    if body.get("logprobs"):
        entries = choice["logprobs"]["content"]
        found["logprobs"] = [entry["logprob"] for entry in entries]
        found["top_logprobs"] = [[top["logprob"] for top in e["top_logprobs"]] for e in entries]
    return found


def check_against_llm(body, answer, expected):
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [*range(len(expected))]
    for choice, own in zip(choices, expected, strict=True):
        found = shown(body, choice, answer)
        if is_chat(body) and "<" in own["text"]:
            del found["text"]  # it may have marks of thoughts or calls, which content has not
        assert found == {name: own[name] for name in found}


def joined(text, body):
    """A stream as the plain answer would be: its choices and its usage."""
    *lines, end = text.split("\n\n")
    assert end == ""
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    choices, answer = {}, {"usage": None}
    for event in events:
        assert "error" not in event, event
        answer["usage"] = event.get("usage") or answer["usage"]
        if "prompt_token_ids" in event:
            answer["prompt_token_ids"] = event["prompt_token_ids"]
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"]})
            assert choice.get("finish_reason") is None, "nothing follows the end"
            add(choice, {name: piece[name] for name in piece if name != "delta"})
            if is_chat(body):
                add_message(choice.setdefault("message", {}), piece["delta"])
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer


def add(whole, piece):
    """Append what is new of a choice: texts and lists grow, other fields are set once."""
    for name, value in piece.items():
        before = whole.get(name)
        if name == "index" or value is None:  # null where a value may come later
            whole.setdefault(name, value)
        elif name == "logprobs" and before is not None:
            for column, entries in value.items():
                before[column] += entries
        elif isinstance(value, str | list) and before is not None:
            whole[name] = before + value
        else:
            whole[name] = value


def add_message(message, delta):
    """Append what is new of a message."""
    for name, value in delta.items():
        if name != "tool_calls":
            add(message, {name: value})
            continue
        calls = message.setdefault("tool_calls", [])
        for piece in value:
            if piece["index"] == len(calls):
                calls.append({**piece, "function": dict(piece["function"])})
                del calls[-1]["index"]
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def plain_message(message):
    """A message's fields that have a value, without the ids of calls, which are random."""
    found = {name: value for name, value in message.items() if value is not None}
    for call in found.get("tool_calls", ()):
        del call["id"]
    return found


def check_joined(stream, plain, body):
    """The stream has every field of the plain answer."""
    whole = joined(stream, body)
    for answer in (whole, plain) if is_chat(body) else ():
        for choice in answer["choices"]:
            choice["message"] = plain_message(choice["message"])
    assert whole["choices"] == plain["choices"]
    assert whole.get("prompt_token_ids") == plain.get("prompt_token_ids")
    if "stream_options" in body:
        for usage in whole["usage"], plain["usage"]:
            usage.pop("prompt_tokens_details")  # the second of the two finds more in the cache
        assert whole["usage"] == plain["usage"]


def check_failure(answers, sentence):
    """Both ways have the engine's error."""
    plain, stream = answers
    assert plain.status_code == 500
    assert sentence in plain.json()["error"]["message"]
    assert (
        sentence
        in json.loads(stream.text.split("\n\n")[-3].removeprefix("data: "))["error"]["message"]
    )


def check(body, answers, expected):
    if expected is None:
        assert [answer.status_code for answer in answers] == [400, 400]
        return
    if isinstance(expected, str):
        check_failure(answers, expected)
        return
    plain, stream = answers
    assert plain.status_code == 200, plain.text
    assert stream.headers["content-type"].startswith("text/event-stream"), stream.text
    check_against_llm(body, plain.json(), expected)
    check_joined(stream.text, plain.json(), body)


async def ask(client, turn, number):
    """Both answers of the server to a request; the two run at once."""
    path, body = a_request(number)
    plain = {name: value for name, value in body.items() if name != "stream_options"}
    async with turn:
        return await asyncio.gather(
            client.post(path, json=plain), client.post(path, json={**body, "stream": True})
        )


@pytest.fixture(scope="module")
def answers(served_answers):
    """The server's answers to all requests."""

    async def ask_all(client):
        turn = asyncio.Semaphore(AT_ONCE)
        return await asyncio.gather(*(ask(client, turn, i) for i in range(NUM_REQUESTS)))

    # without parsers: with one, a form begins after a thought, of which `LLM` knows nothing
    return served_answers(ask_all, reasoning_parser="none", tool_call_parser="none")


@pytest.mark.parametrize("number", range(NUM_REQUESTS))
def test_streamed_plain_and_llm_are_equal(answers, llm, number):
    _, body = a_request(number)
    expected = expected_choices(llm, body)
    try:
        check(body, answers[number], expected)
    except AssertionError as error:
        error.add_note(f"seed {SEED}, request {number}: {json.dumps(body)}")
        raise
