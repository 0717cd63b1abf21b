"""The meaning of a request's fields: parameters, prompts, conversations."""

import asyncio
from types import SimpleNamespace

import pytest
from nv_api.server import ServeOptions, make_app

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("error", [None, ValueError("no such model")])
def test_an_app_in_another_server_loads_its_model(error):
    asked = []

    async def ready():
        asked.append(1)
        if error is not None:
            raise error

    async def run():
        app = make_app(SimpleNamespace(ready=ready), ServeOptions(model="m"))
        async with app.router.lifespan_context(app):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())
    assert asked == [1]


def test_a_template_of_the_server_s_is_in_place_of_the_model_s(serve):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}<think>"
    served = serve(chat_template=template)
    served.chat("ab")
    assert served.last.prompt.text == "[ab]<think>"
    assert served.service.parsers.thoughts is None
    body = {"messages": [{"role": "user", "content": "ab"}]}
    assert served.post("/tokenize", body).json()["tokens"] == served.last.prompt.token_ids
    assert served.client.get("/tokenizer_info").json()["chat_template"] == template
    with pytest.raises(ValueError, match="the option chat_template"):
        ServeOptions(model="m", chat_template="{% if")


def test_b06_a_template_of_the_server_s_that_loses_a_text_is_reported_at_the_start():
    cut = "{% for m in messages %}{{ m.content[0] }}{% endfor %}"
    match = "^the option chat_template prints a message's text only in part, or changed: correct it"
    with pytest.warns(UserWarning, match=match):
        ServeOptions(model="m", chat_template=cut)
    with pytest.raises(ValueError, match=r"^the option chat_template prints the text of no"):
        ServeOptions(model="m", chat_template="hello")


def test_fields_left_out_are_the_checkpoint_s_recommendation(served):
    served.chat()
    params = served.last.params
    assert (params.temperature, params.top_k) == (0.6, 20)
    served.chat(temperature=0, top_k=-1, seed=2**63 - 1, min_p=0.5)
    params = served.last.params
    assert (params.temperature, params.top_k, params.seed, params.min_p) == (0, -1, 2**63 - 1, 0.5)
    served.chat(temperature=None)
    assert served.last.params.temperature == 0.6


def test_the_recommendation_can_be_left_aside(serve):
    served = serve(script={"recommended": {"temperature": 0.6}}, generation_config="nv")
    served.chat()
    assert served.last.params.temperature == 1.0


def test_the_recommendation_can_be_overridden(serve):
    script = {"recommended": {"temperature": 0.6, "top_k": 20}}
    served = serve(script=script, override_generation_config={"temperature": 0.2})
    served.chat()
    assert (served.last.params.temperature, served.last.params.top_k) == (0.2, 20)
    served.chat(temperature=0.9)
    assert served.last.params.temperature == 0.9


def test_a_chat_may_fill_the_context_and_more_is_cut(served):
    served.chat("a")
    room = 512 - len(served.last.prompt.token_ids)
    assert served.last.params.max_tokens == room
    for fields in {"max_tokens": 10**12}, {"max_completion_tokens": 10**6}:
        served.chat("a", **fields)
        assert served.last.params.max_tokens == room
    served.chat("a", max_tokens=9, max_completion_tokens=7)
    assert served.last.params.max_tokens == 7


def test_completions_have_16_tokens(served):
    served.complete("a" * 100)
    assert served.last.params.max_tokens == 16
    served.complete("a" * 100, max_tokens=4.0)
    assert served.last.params.max_tokens == 4
    served.complete("a" * 500, max_tokens=100)
    assert served.last.params.max_tokens == 12


def test_biases_have_string_keys(served):
    served.complete(logit_bias={"5": 1, "256": -100})
    assert served.last.params.logit_bias == {5: 1.0, 256: -100.0}


def test_prompts_of_every_form(served):
    for prompt, ids in (
        ("bc", [[65, 66]]),
        (["bc", "d"], [[65, 66], [67]]),
        ([65, 66], [[65, 66]]),
        ([[65, 66], [67]], [[65, 66], [67]]),
    ):
        before = len(served.llm.submitted)
        assert served.complete(prompt, add_special_tokens=False).status_code == 200
        assert [each.prompt.token_ids for each in served.llm.submitted[before:]] == ids


def test_a_cache_salt_goes_with_the_prompt(served):
    served.chat(cache_salt="mine")
    assert served.last.prompt.cache_salt == "mine"
    served.complete(["a", "b"], cache_salt="mine")
    assert served.last.prompt.cache_salt == "mine"
    served.chat()
    assert served.last.prompt.cache_salt is None


def form_of(served):
    """The grammar that the engine gets."""
    return served.last.params.structured_outputs.grammar


def test_forms_of_an_answer(served):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    for send in served.chat, served.complete:
        send(response_format=asked)
        assert '"properties": {"a": {"type": "integer"}}' in form_of(served)
        send(response_format={"type": "json_object"})
        assert '%json {"type": "object"' in form_of(served)
        assert ("thought" in form_of(served)) == (send == served.chat)
    served.chat(response_format={"type": "text"})
    assert served.last.params.structured_outputs is None
    served.complete(structured_outputs={"choice": ["a", "b"], "regex": None})
    assert served.last.params.structured_outputs.choice == ["a", "b"]


def prompt_of(served, messages, **fields):
    response = served.post("/v1/chat/completions", {"messages": messages, **fields})
    assert response.status_code == 200, response.text
    return served.last.prompt.text


def test_s25_a_developer_s_message_is_a_system_message(served):
    for first in "developer", "system":
        text = prompt_of(served, [{"role": first, "content": "be brief"}, *MESSAGES])
        assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user")


def test_s25_system_messages_at_the_beginning_are_joined(served):
    system = [{"role": "system", "content": "one"}, {"role": "developer", "content": "two"}]
    text = prompt_of(served, [*system, *MESSAGES])
    assert text.startswith("<|im_start|>system\none\n\ntwo<|im_end|>\n<|im_start|>user")


def test_s25_a_late_system_message_stays_where_it_is(served):
    text = prompt_of(served, [*MESSAGES, {"role": "developer", "content": "late"}])
    assert "<|im_start|>system\nlate<|im_end|>" in text


def test_s25_a_late_system_message_that_the_template_drops_is_refused(serve, byte_level):
    served = serve()
    template = byte_level.chat_template
    try:
        served.llm.text.backend.chat_template = (
            "{% for m in messages %}{% if m['role'] == 'user' or loop.first %}{{ m['content'] }}"
            "{% endif %}{% endfor %}"
        )
        messages = [*MESSAGES, {"role": "system", "content": "late"}, *MESSAGES]
        response = served.post("/v1/chat/completions", {"messages": messages})
    finally:
        served.llm.text.backend.chat_template = template
    assert response.status_code == 400
    assert "drops the system message 'late'" in response.json()["error"]["message"]


def test_s25_parts_are_joined(served):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in prompt_of(served, [{"role": "user", "content": parts}])


def test_s25_tool_calls_and_their_results(served):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert "<|im_start|>tool\n42<|im_end|>" in prompt_of(served, messages)


def test_tools_and_template_variables_reach_the_template(served):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert "tools=1" in prompt_of(served, MESSAGES, tools=[tool])
    assert "tools=1" not in prompt_of(served, MESSAGES, tools=[tool], tool_choice="none")
    text = prompt_of(served, MESSAGES, chat_template_kwargs={"enable_thinking": False})
    assert text.endswith("<think></think>")
    assert prompt_of(served, MESSAGES, reasoning_effort="low")


def test_a_last_message_can_be_continued(served):
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer"}]
    text = prompt_of(served, messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe answer")
    assert prompt_of(served, MESSAGES, add_generation_prompt=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_are_read_back_under_both_names(name):
    from nv_api.server.messages import conversation  # noqa: PLC0415  # after the skip

    (_, answer) = conversation([*MESSAGES, {"role": "assistant", "content": "b", name: "hm"}])
    assert answer["reasoning"] == answer["reasoning_content"] == "hm"


def test_tokenize_and_detokenize(served):
    body = served.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json()
    assert body == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [64, 65, 66],
        "token_strs": ["a", "b", "c"],
    }
    assert served.post("/detokenize", {"tokens": [64, 65, 66]}).json() == {"prompt": "abc"}
    served.chat("a")
    body = served.post("/tokenize", {"messages": MESSAGES}).json()
    assert body["tokens"] == served.last.prompt.token_ids
    for wrong in {}, {"prompt": "a", "messages": MESSAGES}, {"messages": []}:
        assert served.post("/tokenize", wrong).status_code == 400
    refused = served.post("/detokenize", {"tokens": [10**6]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


def test_tokenizer_info(served):
    body = served.client.get("/tokenizer_info").json()
    assert body["tokenizer_class"]
    assert "im_start" in body["chat_template"]
    assert body["eos_token"] == "<|endoftext|>"
