import pytest

USER = {"role": "user", "content": "hi"}
HEAD = "<|im_start|>user\nhi<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"


def prompt_of(llm, messages, **options):
    return [output.prompt for output in llm.chat(messages, use_tqdm=False, **options)]


def test_one_conversation_or_several(scripted):
    llm = scripted()
    other = [USER, {"role": "assistant", "content": "ho"}, USER]
    assert prompt_of(llm, [USER]) == [HEAD + OPEN]
    assert prompt_of(llm, [[USER], other]) == [
        HEAD + OPEN,
        HEAD + "<|im_start|>assistant\nho<|im_end|>\n" + HEAD + OPEN,
    ]
    assert llm.chat([], use_tqdm=False) == []


def test_the_prompt_is_tokenized_once_with_its_special_tokens(scripted):
    llm = scripted()
    (output,) = llm.chat([USER], use_tqdm=False)
    assert output.prompt_token_ids == llm.tokenizer.encode(HEAD + OPEN, add_special_tokens=False)
    assert output.prompt_token_ids[0] == llm.tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_what_reaches_the_template(scripted):
    llm = scripted()
    off = {"enable_thinking": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert prompt_of(llm, [USER], chat_template_kwargs=off) == [HEAD + OPEN + "<think></think>"]
    assert prompt_of(llm, [USER], tools=[tool]) == [HEAD + "tools=1\n" + OPEN]
    assert prompt_of(llm, [USER], add_generation_prompt=False) == [HEAD]
    assert prompt_of(llm, [USER], chat_template="{{ messages[0].content }}!") == ["hi!"]


def test_continue_the_final_message(scripted):
    llm = scripted()
    started = [USER, {"role": "assistant", "content": "well"}]
    how = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(llm, started, **how) == [HEAD + OPEN + "well"]
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        llm.chat(started, continue_final_message=True)


def test_text_parts_are_joined(scripted):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    llm = scripted()
    assert prompt_of(llm, [{"role": "user", "content": parts}]) == [
        HEAD.replace("hi", "a\nb") + OPEN
    ]
    with pytest.raises(NotImplementedError, match="image_url"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_a_call_of_a_tool_stands_in_for_a_content(scripted):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert prompt_of(scripted(), [USER, call]) == [
        HEAD + "<|im_start|>assistant\n<|im_end|>\n" + OPEN
    ]


@pytest.mark.parametrize(
    ("messages", "error", "match"),
    [
        ("hi", TypeError, "messages is a str: it must be a list"),
        (USER, TypeError, "messages is a dict: .*: put the message in a list"),
        (None, TypeError, "messages is a NoneType: it must be a list"),
        ([None], TypeError, "messages holds a NoneType: it must be a list"),
        ([[]], ValueError, "empty"),
        ([[USER, "hi"]], TypeError, "must be a dict"),
        ([{"content": "hi"}], ValueError, "no 'role'"),
        ([{"role": 5, "content": "hi"}], ValueError, "the role 5: give one"),
        ([{"role": "user"}], ValueError, "{'role': 'user'} has no 'content': give it a text"),
        ([{"role": "user", "content": None}], ValueError, "has no 'content': give it a text"),
        ([{"role": "user", "content": 5}], TypeError, "content is 5: it must be a text"),
        ([{"role": "user", "content": [5]}], TypeError, "part is 5: it must be a text"),
        ([{"role": "user", "content": [{"type": "text"}]}], TypeError, "part is {'type': 'text'}"),
        ([{"role": "user", "content": "\ud800"}], ValueError, "no valid Unicode"),
    ],
)
def test_what_is_no_conversation(scripted, engine, messages, error, match):
    with pytest.raises(error, match=match):
        scripted().chat(messages)
    assert engine.num_added == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, ValueError, "has 'tokenize'.*take it out"),
        ({"chat_template_kwargs": {"messages": []}}, ValueError, "has 'messages'.*take it out"),
        ({"chat_template_kwargs": 5}, TypeError, "chat_template_kwargs is 5: it must be a dict"),
        ({"chat_template": 5}, TypeError, "chat_template is 5: it must be a Jinja template"),
        ({"chat_template": "{% bad"}, ValueError, "unknown tag 'bad'"),
        ({"chat_template": "{{ raise_exception('no') }}"}, ValueError, "does not take.*: no"),
        ({"chat_template": "{{ 1 / 0 }}"}, ValueError, r"failed .* \(ZeroDivisionError: division"),
        ({"chat_template": "{{ 'a' + 5 }}"}, ValueError, r"failed on these messages \(TypeError"),
        (
            {"chat_template": "{{ '%d' % 'a' }}"},
            ValueError,
            r"failed on these messages \(TypeError",
        ),
        ({"chat_template": "{{ '{1}'.format(0) }}"}, ValueError, r"failed .* \(IndexError"),
        ({"chat_template": "{{ range(0, 3, 0) }}"}, ValueError, r"failed .* \(ValueError"),
        ({"chat_template": "{{ '' }}"}, ValueError, "the prompt is empty"),
        ({"tools": {"name": "f"}}, TypeError, "tools is {'name': 'f'}: it must be a list"),
        ({"sampling_params": 5}, TypeError, "must be a SamplingParams"),
    ],
)
def test_what_the_template_cannot_take(scripted, engine, options, error, match):
    with pytest.raises(error, match=match):
        scripted().chat([USER], **options)
    assert engine.num_added == 0


def test_a_tokenizer_without_a_template_says_what_to_do(scripted):
    llm = scripted()
    llm.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template: pass chat_template"):
        llm.chat([USER])
