import copy
from types import MappingProxyType

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:the chat_template of this call")
"""Most templates here print a part of a conversation."""

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


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
FORMS = {
    "openai": "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}[{{ c.text }}]"
    "{% endfor %}{% endfor %}",
    "either": "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endif %}{% endfor %}",
    "string": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
@pytest.mark.parametrize(
    ("form", "content", "shown"),
    [
        ("openai", "ab", "[ab]"),
        ("openai", PARTS, "[a][b]"),
        ("openai", ("a", "b"), "[a][b]"),
        ("openai", [], ""),
        ("openai", "", "[]"),
        ("either", "ab", "ab"),
        ("either", PARTS, "[a][b]"),
        ("either", [], ""),
        ("string", "ab", "ab"),
        ("string", PARTS, "a\nb"),
        ("string", [{"type": "text", "text": ""}, "a", ""], "a"),
        (
            "string",
            [{"type": "output_text", "text": "a"}, {"refusal": "b", "type": "refusal"}],
            "a\nb",
        ),
        ("string", [], ""),
    ],
)
def test_b06_a_template_gets_the_form_of_content_that_it_reads(
    scripted, form, role, content, shown
):
    messages = [{"role": role, "content": content}]
    assert prompt_of(scripted(), messages, chat_template=FORMS[form]) == [f"<{role}>{shown}"]


def test_b06_a_content_that_the_tree_does_not_show_is_in_the_prompt(scripted):
    template = (
        "{% for c in messages | map(attribute='content') %}{% for p in c %}[{{ p.text }}]"
        "{% endfor %}{% endfor %}"
    )
    assert prompt_of(scripted(), [USER], chat_template=template) == ["[hi]"]


def test_b06_the_tokenizer_s_own_and_its_named_templates(scripted):
    llm = scripted()
    llm.tokenizer.chat_template = FORMS["openai"]
    assert prompt_of(llm, [USER]) == ["<user>[hi]"]
    llm.tokenizer.chat_template = {"default": FORMS["string"], "tool_use": FORMS["openai"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert prompt_of(llm, [USER]) == ["<user>hi"]
    with pytest.warns(UserWarning, match="there are tools"):
        llm.stream_chat([USER], tools=[tool])
    with pytest.warns(UserWarning, match="there are tools"):
        assert prompt_of(llm, [USER], tools=[tool]) == ["<user>[hi]"]
    assert prompt_of(llm, [USER], chat_template="tool_use") == ["<user>[hi]"]


def test_b06_the_form_can_be_given(scripted):
    options = {"chat_template": FORMS["either"], "chat_template_content_format": "openai"}
    assert prompt_of(scripted(), [USER], **options) == ["<user>[hi]"]
    with pytest.raises(ValueError, match="chat_template_content_format is 'parts': it must be one"):
        scripted().chat([USER], chat_template_content_format="parts")


def test_b06_parts_are_printed_as_their_text(scripted):
    loop = "{% for c in messages[1].content %}({{ c.text }}){% endfor %}"
    messages = [{"role": "system", "content": PARTS}, USER]
    assert prompt_of(
        scripted(), messages, chat_template="{{ messages[0].content | trim }}" + loop
    ) == ["a\nb(hi)"]


def test_a_call_of_a_tool_stands_in_for_a_content(scripted):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.warns(UserWarning, match="there are tool_calls"):
        prompts = prompt_of(scripted(), [USER, call])
    assert prompts == [HEAD + "<|im_start|>assistant\n<|im_end|>\n" + OPEN]


CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    "{{ (m.function_call or '') | tojson }}{{ m.tool_calls is defined }}{% endfor %}"
)


class Model:
    """The methods that a pydantic model of a call has."""

    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self):
        return self.fields


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"city": "Oslo"}', '{"city": "Oslo"}'),
        ({"city": "Oslo"}, '{"city": "Oslo"}'),
        (MappingProxyType({"at": (1, 2)}), '{"at": [1, 2]}'),
        ('{"code": "{\\"a\\": 1}"}', '{"code": "{\\"a\\": 1}"}'),
        ("", "{}"),
        (" ", "{}"),
        (None, "{}"),
        ("{}", "{}"),
    ],
)
@pytest.mark.parametrize("kind", [dict, MappingProxyType, lambda call: Model(**call)])
def test_b07_arguments_reach_the_template_as_an_object(scripted, kind, arguments, parsed):
    function = {"name": "f", "arguments": arguments}
    shown = '{"name": "f", "arguments": ' + parsed + "}"
    calls = (kind({"id": "1", "function": function}), kind(function))
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    given = copy.deepcopy(function) if isinstance(arguments, dict | str) else function
    assert prompt_of(scripted(), messages, chat_template=CALLS) == [
        '{"id": "1", "function": ' + shown + "}" + shown + '""True'
    ]
    assert function == given
    legacy = {"role": "assistant", "function_call": kind(function)}
    assert prompt_of(scripted(), [legacy], chat_template=CALLS) == [shown + "False"]


def test_b07_a_list_without_calls_is_left_out(scripted):
    messages = [{"role": "assistant", "content": "a", "tool_calls": []}]
    assert prompt_of(scripted(), messages, chat_template=CALLS) == ['""False']


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            "{'a': 1}",
            ValueError,
            r"arguments is \"{'a': 1}\", which is not JSON .*: give a dict, or",
        ),
        ('{"a": NaN}', ValueError, "arguments is .* not JSON .it has NaN.: give a dict"),
        ("[" * 99999, ValueError, "arguments is .* which is not JSON"),
        (
            "[1]",
            ValueError,
            r"arguments is '\[1\]': it must be a dict, or the JSON text of an object",
        ),
        ('{"a":' * 80 + "1" + "}" * 80, ValueError, "arguments is nested over 64 levels deep"),
        ("null", ValueError, "arguments is 'null': it must be a dict"),
        (5, ValueError, "arguments is 5: it must be a dict"),
    ],
)
def test_b07_arguments_that_are_no_object_name_their_place(scripted, engine, call, error, match):
    calls = [{"function": {"name": "f"}}, {"function": {"name": "f", "arguments": call}}]
    where = r"message 1: tool_calls\[1\]\.function\."
    with pytest.raises(error, match=where + match):
        scripted().chat([USER, {"role": "assistant", "tool_calls": calls}])
    with pytest.raises(error, match=f"conversation 0, {where}{match}"):
        scripted().chat([[USER, {"role": "assistant", "tool_calls": calls}]])
    assert engine.num_added == 0


@pytest.mark.parametrize(
    ("calls", "error", "match"),
    [
        ({"function": {"name": "f"}}, TypeError, "message 0: tool_calls is .*: it must be a list"),
        ("f", TypeError, "tool_calls is 'f': it must be a list"),
        (torch.tensor(1), TypeError, r"tool_calls is tensor\(1\): it must be a list"),
        ([5], TypeError, r"tool_calls\[0\] is 5: it must be a dict"),
        ([{"function": 5}], TypeError, r"tool_calls\[0\].function is 5: it must be a dict"),
        ([{"type": "custom", "custom": {}}], ValueError, "names no function: it must be"),
        (
            [{"function": {"arguments": "{}"}}],
            ValueError,
            r"\[0\].function is .* names no function",
        ),
    ],
)
def test_b07_what_is_no_call(scripted, calls, error, match):
    with pytest.raises(error, match=match):
        scripted().chat([{"role": "assistant", "tool_calls": calls}])


ON = {"add_generation_prompt": False, "continue_final_message": True}
TRIMS = "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}</>\n{% endfor %}"


@pytest.mark.parametrize("role", ["assistant", "user"])
@pytest.mark.parametrize(
    ("content", "template", "end"),
    [
        ("The", FORMS["string"], "The"),
        ("The ", FORMS["string"], "The "),
        ("The ", TRIMS, "\nThe"),
        ("  The\n", TRIMS, "\nThe"),
        ("", TRIMS, "\n"),
        (" \n", TRIMS, "\n"),
        ("", FORMS["string"], ""),
        ("hi", FORMS["string"], "hi"),
        ("EndOfMessage1", TRIMS, "\nEndOfMessage1"),
        ("CONTINUE_FINAL_MESSAGE_TAG ", TRIMS, "\nCONTINUE_FINAL_MESSAGE_TAG"),
        (PARTS, FORMS["openai"], "[a][b"),
        (PARTS, FORMS["string"], "a\nb"),
        ([], FORMS["string"], ""),
    ],
)
def test_b19_a_prompt_ends_with_the_final_message(scripted, role, content, template, end):
    messages = [USER, {"role": role, "content": content}]
    (prompt,) = prompt_of(scripted(), messages, chat_template=template, **ON)
    assert prompt.partition(">")[2].partition(">")[2].removeprefix("\n<" + role + ">") == end


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (FORMS["string"] + "({{ messages[-1].content }})", "prints the last message 2 times"),
        (FORMS["either"] + "({{ messages | tojson }})", "prints the last message 2 times"),
        ("{{ messages[0].content }}", "prints the last message 0 times"),
        ("{{ messages[-1].content | upper }}", "prints the last message 0 times"),
        ("{{ messages[-1].content | replace('T', 'D') }}", "changes the last message, 'The'"),
        ("{{ messages[-1].content[1:] }}", "changes the last message, 'The'"),
        ("{{ messages[-1].content[:3] }}", "prints the last message 0 times"),
        ("{{ messages[-1].content }}{{ messages[-1].content | length }}", "changes the last"),
    ],
)
def test_b19_a_template_that_cannot_be_continued_is_refused(scripted, engine, template, match):
    messages = [USER, {"role": "assistant", "content": "The"}]
    with pytest.raises(ValueError, match=match + ".*: pass another chat_template"):
        scripted().chat(messages, chat_template=template, **ON)
    assert engine.num_added == 0


def test_b19_an_empty_message_that_the_template_leaves_out_is_refused(scripted):
    template = "{% for m in messages if m.content %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    with pytest.raises(ValueError, match="changes the last message, ''"):
        scripted().chat([USER, {"role": "assistant", "content": ""}], chat_template=template, **ON)


def test_b19_calls_after_the_text_are_refused(scripted):
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(ValueError, match="ends with calls of tools: remove them"):
        scripted().chat([USER, called], **ON)


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
        ([{"role": "user", "content": "\ud800"}], ValueError, "not valid Unicode"),
    ],
)
def test_what_is_no_conversation(scripted, engine, messages, error, match):
    with pytest.raises(error, match=match):
        scripted().chat(messages)
    assert engine.num_added == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, ValueError, "has 'tokenize'.*remove it"),
        ({"chat_template_kwargs": {"messages": []}}, ValueError, "has 'messages'.*remove it"),
        ({"chat_template_kwargs": 5}, TypeError, "chat_template_kwargs is 5: it must be a dict"),
        ({"chat_template": 5}, TypeError, "chat_template is 5: it must be a Jinja template"),
        ({"chat_template": "./chat.jinja"}, ValueError, "of a file, pass the text"),
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


def test_a_tokenizer_without_a_template_is_refused_with_the_fix(scripted):
    llm = scripted()
    llm.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template: pass chat_template"):
        llm.chat([USER])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x" * 18000}]},
        {"role": "assistant", "tool_calls": "x" * 18000},
        {"role": "user", "content": {"text": "x" * 18000}},
        {"role": "user", "content": [{"type": "x" * 18000}]},
        {"role": "x" * 18000},
    ],
)
def test_an_error_shortens_a_long_value(scripted, message):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="xxx") as error:
        scripted().chat([message], use_tqdm=False)
    assert len(str(error.value)) < 600
