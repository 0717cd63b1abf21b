"""openai's client: chat, streams, several choices, log-probabilities, usage, forms, errors."""

import asyncio
import math
import time
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

GREEDY = {"temperature": 0, "max_tokens": 24}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say ab."}]


class Weather(BaseModel):
    sky: Literal["clear", "cloudy"]
    windy: bool


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.v1, api_key=served.key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def chat(client, served):
    def create(**fields):
        return client.chat.completions.create(
            **{"model": served.model, "messages": MESSAGES, **GREEDY, **fields}
        )

    return create


@pytest.fixture(scope="module")
def complete(client, served):
    def create(**fields):
        return client.completions.create(
            **{"model": served.model, "prompt": "Say ab.", **GREEDY, **fields}
        )

    return create


def joined(chunks, index=0):
    """The text of one choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_chat(chat, served):
    answer = chat()
    (choice,) = answer.choices
    assert answer.model == served.model
    assert answer.object == "chat.completion"
    assert abs(answer.created - time.time()) < 600
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert 0 < usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer._request_id


def test_a_stream_joined_is_the_plain_answer(chat):
    plain = chat(logprobs=True, top_logprobs=2)
    chunks = [*chat(logprobs=True, top_logprobs=2, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert joined(chunks) == plain.choices[0].message.content
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [
        plain.choices[0].finish_reason
    ]
    positions = [
        position
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for position in choice.logprobs.content
    ]
    assert positions == plain.choices[0].logprobs.content


def test_usage_is_the_last_chunk_of_a_stream(chat):
    *chunks, last = chat(stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == chat().usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_stream_helper_and_the_parsed_answer(client, served):
    fields = {"model": served.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
    answer = client.chat.completions.parse(**fields, response_format=Weather)
    with client.chat.completions.stream(**fields, response_format=Weather) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Weather)
    assert final.choices[0].message.content == answer.choices[0].message.content
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_several_choices(chat):
    fields = {"n": 3, "temperature": 1.0, "seed": 7}
    plain = chat(**fields)
    texts = [choice.message.content for choice in plain.choices]
    assert [choice.index for choice in plain.choices] == [0, 1, 2]
    assert len({*texts}) == 3
    chunks = [*chat(**fields, stream=True)]
    assert [joined(chunks, index) for index in range(3)] == texts


def test_log_probabilities_of_a_chat(chat):
    answer = chat(logprobs=True, top_logprobs=3)
    positions = answer.choices[0].logprobs.content
    assert len(positions) == answer.usage.completion_tokens
    for position in positions:
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].logprob == position.logprob
        assert position.logprob <= 0
    spelled = bytes(byte for position in positions for byte in position.bytes)
    assert spelled.decode("utf-8", "replace").startswith(answer.choices[0].message.content)


def test_log_probabilities_of_a_completion(complete):
    answer = complete(prompt=["ab", [0, 1, 2, 3]], n=2, echo=True, logprobs=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    lengths = [2, 2, 4, 4]
    for choice, prompt_len in zip(answer.choices, lengths, strict=True):
        columns = choice.logprobs
        assert columns.token_logprobs[0] is None
        assert columns.top_logprobs[0] is None
        assert all(math.isfinite(value) for value in columns.token_logprobs[1:])
        assert all(len(tops) in (1, 2, 3) for tops in columns.top_logprobs[1:])
        assert prompt_len < len(columns.tokens) <= prompt_len + 4
        assert len(columns.text_offset) == len(columns.tokens)
    assert answer.choices[0].text.startswith("ab")


def test_a_streamed_completion(complete):
    fields = {"prompt": ["ab", "cd"], "n": 2, "seed": 1, "temperature": 1.0}
    plain = complete(**fields)
    chunks = [*complete(**fields, stream=True)]
    for choice in plain.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert pieces[-1].finish_reason == choice.finish_reason


def test_models(client, served):
    names = [model.id for model in client.models.list()]
    assert names[0] == served.model
    assert [client.models.retrieve(name).id for name in names] == names


def test_many_at_once(served, chat):
    expected = chat().choices[0].message.content

    async def main():
        async with openai.AsyncOpenAI(base_url=served.v1, api_key=served.key) as client:
            create = client.chat.completions.create
            fields = {"model": served.model, "messages": MESSAGES, **GREEDY}
            plain = [create(**fields) for _ in range(16)]
            streams = [create(**fields, stream=True) for _ in range(16)]
            answers = [each.choices[0].message.content for each in await asyncio.gather(*plain)]
            begun = await asyncio.gather(*streams)
            answers += [joined([chunk async for chunk in stream]) for stream in begun]
        return answers

    assert {*asyncio.run(main())} == {expected}


def test_the_first_tokens_of_a_stream_arrive_before_its_end(chat):
    stream = chat(stream=True, max_tokens=100, extra_body={"ignore_eos": True})
    began = time.monotonic()
    times = [time.monotonic() - began for _ in stream]
    assert len(times) > 20
    assert times[1] < times[-1] / 2


def test_an_ignored_field_is_named(client, served):
    raw = client.chat.completions.with_raw_response.create(
        model=served.model, messages=MESSAGES, **GREEDY, user="me", extra_body={"colour": 1}
    )
    assert raw.headers["x-ignored-fields"] == "colour"
    assert raw.parse().choices


def test_a_wrong_key(served):
    client = openai.OpenAI(base_url=served.v1, api_key="sk-wrong", max_retries=0)
    for call in client.models.list, lambda: client.models.retrieve(served.model):
        with pytest.raises(openai.AuthenticationError) as caught:
            call()
        assert caught.value.type == "authentication_error"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model(chat, stream):
    with pytest.raises(openai.NotFoundError, match="tiny") as caught:
        chat(model="gpt-none", stream=stream)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"logit_bias": {"AI": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": 5}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
def test_a_wrong_field(chat, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(**fields, stream=stream)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long(chat):
    with pytest.raises(openai.BadRequestError, match=r"\d{4} tokens.*1024") as caught:
        chat(messages=[{"role": "user", "content": "a" * 1100}])
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_does_not_wait(client, served):
    """The server drops the request of a client that left."""
    impatient = client.with_options(timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(
            model=served.model,
            messages=MESSAGES,
            n=32,
            max_tokens=1000,
            extra_body={"ignore_eos": True},
        )
    deadline = time.monotonic() + 10
    headers = {"authorization": f"Bearer {served.key}"}
    while True:
        metrics = httpx.get(f"{served.url}/metrics", headers=headers).text
        (gauge,) = [
            line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running{")
        ]
        if gauge.endswith(" 0.0"):
            break
        assert time.monotonic() < deadline, gauge
        time.sleep(0.1)
