"""The shapes of answers: a stream joined is the plain answer."""

import pytest
from joining import joined_chat, plain_chat
from nv_api.server.protocol.completions import CompletionChunk, CompletionResponse

EOS = 256


def ids_of(served, text):
    return served.llm.text.encode([text], add_special_tokens=False)[0]


def joined_completion(chunks):
    choices = {}
    for chunk in chunks:
        CompletionChunk.model_validate(chunk)
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"], {"text": "", "logprobs": None, "ids": [], "prompt": None}
            )
            choice["text"] += part["text"]
            choice["ids"] += part.get("token_ids", [])
            choice["prompt"] = choice["prompt"] or part.get("prompt_token_ids")
            for name, column in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(column)
            if part["finish_reason"]:
                assert "finish_reason" not in choice, "it ends once"
                choice |= {k: part[k] for k in ("finish_reason", "stop_reason")}
    return [choices[index] for index in sorted(choices)]


def plain_completion(body):
    CompletionResponse.model_validate(body)
    return [
        {
            "text": choice["text"],
            "logprobs": choice["logprobs"],
            "ids": choice.get("token_ids", []),
            "prompt": choice.get("prompt_token_ids"),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in body["choices"]
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"max_tokens": 3},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        {"return_token_ids": True},
        {"stop": ["us", "zz"]},
        {"stop": "us", "include_stop_str_in_output": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2},
    ],
    ids=str,
)
def test_s22_a_chat_s_stream_joined_is_the_plain_answer(served, events, fields):
    plain = served.chat("hello wörld 🙂", **{k: v for k, v in fields.items() if "stream" not in k})
    streamed = served.chat("hello wörld 🙂", **{"stream": True, **fields})
    assert (plain.status_code, streamed.status_code) == (200, 200)
    assert joined_chat(events(streamed.text)) == plain_chat(plain.json())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "max_tokens": 40},
        {"prompt": ["ab", "cde", "f", "gh"], "n": 3},
        {"prompt": [[1, 2, 3], [4, 5]], "return_token_ids": True},
        {"logprobs": 2},
        {"logprobs": 0, "n": 2, "prompt": ["ab", "é🙂"]},
        {"echo": True, "n": 2},
        {"echo": True, "logprobs": 1, "prompt": ["ab", "é🙂"], "return_token_ids": True},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"return_tokens_as_token_ids": True, "logprobs": 1},
    ],
    ids=str,
)
def test_s22_completions_streams_joined_are_the_plain_answer(served, events, fields):
    plain = served.complete(**{"prompt": "hello wörld 🙂", **fields})
    streamed = served.complete(**{"prompt": "hello wörld 🙂", **fields, "stream": True})
    assert (plain.status_code, streamed.status_code) == (200, 200), plain.text
    assert joined_completion(events(streamed.text)) == plain_completion(plain.json())


def test_s22_the_index_is_prompt_times_n_plus_i(served):
    prompts = ["ab", "cde", "f", "gh"]
    body = served.complete(prompts, n=3, max_tokens=5).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(12))
    found = [choice["text"] for choice in body["choices"]]
    assert found == [prompt[i:] for prompt in prompts for i in range(3)]
    assert body["usage"]["prompt_tokens"] == 8


def test_s22_a_stream_of_four_prompts_ends_each_choice_once(served, events):
    chunks = events(served.complete(["ab", "cde", "f", "gh"], n=3, stream=True).text)
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == list(range(12))


def test_a_stream_s_headers_and_first_write(serve):
    served = serve(script={"pace": 0.05})
    with served.client.stream(
        "POST",
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x"}], "stream": True},
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"]
        first = next(response.iter_raw()).decode()
    assert first.count("data: ") == 2, "the role and the first text come in one write"
    assert '"delta":{"role":"assistant","content":""}' in first
    assert '"finish_reason":null}]}' in first
    assert '"usage"' not in first


def test_an_answer_without_text_still_has_its_role_and_end(serve, events):
    served = serve(script={"answers": [[EOS]]})
    chunks = events(served.chat(stream=True).text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_each_choice_of_a_stream_has_its_role_once_and_first(served, events):
    seen = {}
    for chunk in events(served.chat("ab", n=3, stream=True).text):
        (choice,) = chunk["choices"]
        seen.setdefault(choice["index"], []).append("role" in choice["delta"])
    assert sorted(seen) == [0, 1, 2]
    assert all(roles[0] and sum(roles) == 1 for roles in seen.values())


def test_s19_an_emoji_split_over_tokens_is_never_half(serve, events):
    served = serve()
    text = "a🙂é日本b"
    ids = ids_of(served, text)
    assert len(ids) > len(text)
    served.llm.answers = [[*ids, EOS]] * 3
    streamed = served.chat(stream=True).text
    assert "\ufffd" not in streamed
    assert "\\ufffd" not in streamed
    assert joined_chat(events(streamed))[0]["content"] == text
    with_tokens = served.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in with_tokens[:-1]) == text.encode()
    offsets = served.complete(logprobs=0, max_tokens=40).json()["choices"][0]["logprobs"]
    smiley = [b for b, t in zip(offsets["text_offset"], offsets["tokens"], strict=True)]
    assert smiley[:6] == [0, 1, 1, 1, 1, 2], "each part of a character begins where it does"


@pytest.mark.parametrize("stop", ["STOP", "lo wor"])
def test_s20_no_part_of_a_stop_string_leaks(serve, events, stop):
    served = serve()
    served.llm.answers = [[*ids_of(served, f"before {stop} after"), EOS]] * 2
    (choice,) = joined_chat(events(served.chat(stream=True, stop=[stop]).text))
    assert (choice["content"], choice["finish_reason"]) == ("before ", "stop")
    assert choice["stop_reason"] == stop
    assert served.chat(stop=stop).json()["choices"][0]["message"]["content"] == "before "


def test_s21_usage_is_there_when_it_is_asked_for(served, events):
    without = events(served.chat("ab", stream=True).text)
    assert not any("usage" in chunk for chunk in without)
    chunks = events(served.chat("ab", stream=True, stream_options={"include_usage": True}).text)
    *others, last = chunks
    assert last["choices"] == []
    assert [chunk["usage"] for chunk in others] == [None] * len(others)
    plain = served.chat("ab").json()
    assert last["usage"] == plain["usage"]
    usage = plain["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == usage["prompt_tokens"] + 1


def test_s21_a_prompt_counts_once_for_three_completions(served, events):
    one, three = (served.chat("ab", n=n, max_tokens=2).json()["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 6
    streamed = served.chat(
        "ab", n=3, max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    assert events(streamed.text)[-1]["usage"] == three


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "<think>\nhm\n</think>"),
        (" <think>hm", " <think>hm"),
        ("  Yes <think>.", ""),
        ("<thin", ""),
    ],
)
def test_s21_tokens_of_thoughts_are_counted(serve, calling, events, text, thought):
    ids = {}
    served = serve()
    for part in text, thought:
        ids[part] = served.llm.text.encode([part], add_special_tokens=False)[0]
    served.llm.answers = [ids[text]] * 3
    usage = served.chat("ab", max_tokens=len(ids[text])).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(ids[thought])}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = events(served.chat("ab", max_tokens=len(ids[text]), **options).text)
    assert streamed[-1]["usage"] == usage
    completion = served.complete("ab", max_tokens=len(ids[text])).json()["usage"]
    assert completion["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_s21_cached_tokens_are_counted_apart(serve):
    served = serve(script={"num_cached_tokens": 16})
    usage = served.chat("ab").json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


def test_s21_a_late_error_is_an_event_and_the_stream_ends(serve, events):
    served = serve(script={"answers": [[5, 6, -1]] * 3})
    response = served.chat(stream=True, stream_options={"include_usage": True})
    assert response.status_code == 200
    *_, last = events(response.text)
    assert last["error"]["type"] == "server_error"
    assert "out of memory" in last["error"]["message"]
    plain = served.chat()
    assert plain.status_code == 500
    assert plain.json() == last
    assert served.chat(n=2).status_code == 500
    assert served.chat().status_code == 200, "the next request works"


def test_log_probabilities_of_a_chat(served):
    body = served.chat("ab", logprobs=True, top_logprobs=2, max_tokens=1).json()
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "<|im_start|>"
    assert entry["logprob"] == -0.5
    assert entry["bytes"] == list(b"<|im_start|>")
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.0]
    assert served.last.params.logprobs == 2
    assert served.chat("ab").json()["choices"][0]["logprobs"] is None


def test_a_log_probability_that_is_not_finite(serve):
    served = serve(script={"answers": [[ord("Z") - 33, EOS]] * 2})
    (first, _) = served.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert first["logprob"] == -9999.0
    assert served.complete(logprobs=0).json()["choices"][0]["logprobs"]["token_logprobs"] == [
        -9999.0,
        -0.5,
    ]


def test_log_probabilities_of_an_echo_begin_with_the_prompt(served):
    body = served.complete("abc", echo=True, logprobs=1, max_tokens=1).json()
    (choice,) = body["choices"]
    assert choice["text"] == "abca"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "a"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][:2] == [None, {"b": -0.5, "c": -1.0}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert served.last.params.prompt_logprobs == 1


def test_an_echo_of_token_ids_alone(served):
    body = served.complete([65, 66], echo=True, max_tokens=0, logprobs=0).json()
    (choice,) = body["choices"]
    assert choice["text"] == "bc"
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 2
    assert body["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_of_both_routes(served):
    chat = served.chat("ab", prompt_logprobs=1, max_tokens=1).json()["prompt_logprobs"]
    assert chat[0] is None
    assert next(iter(chat[1].values())) == {"logprob": -0.5, "rank": 1, "decoded_token": "u"}
    (choice,) = served.complete("ab", prompt_logprobs=0, max_tokens=1).json()["choices"]
    assert [entry and list(entry) for entry in choice["prompt_logprobs"]] == [None, ["65"]]
    for refused in (
        served.chat(prompt_logprobs=1, stream=True),
        served.complete(prompt_logprobs=1, stream=True),
    ):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_token_ids_are_returned_on_request(served, events):
    body = served.chat("ab", return_token_ids=True, max_tokens=2).json()
    assert body["prompt_token_ids"] == served.last.prompt.token_ids
    assert body["choices"][0]["token_ids"] == served.last.prompt.token_ids[:2]
    chunks = events(served.chat("ab", return_token_ids=True, max_tokens=2, stream=True).text)
    assert [chunk.get("prompt_token_ids") for chunk in chunks].count(None) == len(chunks) - 1
    assert chunks[0]["prompt_token_ids"] == served.last.prompt.token_ids
    assert "token_ids" not in served.chat("ab").json()["choices"][0]


def test_names_and_times_of_an_answer(served):
    body = served.chat("ab").json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "m/tiny"
    assert body["choices"][0]["message"]["role"] == "assistant"
    text = served.complete("ab").json()
    assert text["id"].startswith("cmpl-")
    assert text["object"] == "text_completion"


def test_pings_come_only_if_they_are_asked_for(serve):
    served = serve(script={"pace": 0.15}, ping_interval=0.02)
    assert ": ping\n\n" in served.complete("a", stream=True).text
