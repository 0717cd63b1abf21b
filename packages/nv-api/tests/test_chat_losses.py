"""B06's siblings: a template that loses or changes a part of a conversation is warned of at load.

The templates that are right are short forms of those in wide use.
"""

import warnings

import pytest
from nv_api.chat_check import check_chat
from nv_api.chat_losses import losses
from nv_api.conversation import Rendering, check_read, conversation_list
from nv_api.tokenizer import Tokenizer

IN_MESSAGES = "{%% for m in messages %%}<|{{ m.role }}|>%s\n{%% endfor %%}"
OF_USER = "{% if m.role == 'user' %}{{ m.content }}{% endif %}"
HISTORY = "{%% for m in messages%s %%}<|{{ m.role }}|>{{ m.content }}\n{%% endfor %%}"

USER = {"role": "user", "content": "hi"}
SYSTEM = "does not print the messages with the role 'system'"
ANSWERS = "does not print the messages with the role 'assistant'"
CASE = "prints a message's text in upper or lower case"
SPACES = "prints a message's text with other spaces or line breaks"
PART = "prints a message's text only in part, or changed"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ m.content[0] }}", PART),
        ("{{ m.content[-1] }}", PART),
        ("{{ m.content[1:] }}", PART),
        ("{{ m.content[:-1] }}", PART),
        ("{{ m.content[:4000] }}", PART),
        ("{{ m.content | truncate(255) }}", PART),
        ("{{ m.content.split('\n')[0] }}", PART),
        ("{{ m.content | striptags }}", PART),
        ("{{ m.content | reverse }}", PART),
        ("{{ m.content | replace('<', '') }}", PART),
        ("{{ m.content | first }}", PART),
        ("{{ m.content | upper }}", CASE),
        ("{{ m.content | lower }}", CASE),
        ("{{ m.content | capitalize }}", CASE),
        ("{{ m.content | escape }}", "prints a message's text escaped as HTML"),
        ("{{ m.content | e }}", "prints a message's text escaped as HTML"),
        ("{{ m.content | replace(' ', '') }}", SPACES),
        ("{{ m.content.split() | join(' ') }}", SPACES),
        ("{{ m.content | indent }}", SPACES),
        ("{{ m.content | replace('\n', ' ') }}", SPACES),
        ("{% for c in m.content %}{{ c.text | upper }}{% endfor %}", CASE),
        (
            "{% if m.role == 'user' %}{{ m.content | upper }}{% else %}{{ m.content }}{% endif %}",
            CASE,
        ),
        ("{% if m.role != 'system' %}{{ m.content }}{% endif %}", SYSTEM),
        ("{% if m.role != 'assistant' %}{{ m.content }}{% endif %}", ANSWERS),
    ],
)
def test_B06_a_part_that_is_lost_or_changed_is_named(body, expected):
    assert losses(IN_MESSAGES % body) == [expected]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{{ messages[-1].content }}",
            [ANSWERS, SYSTEM, "does not print 17 of 18 messages of a conversation"],
        ),
        (HISTORY % "[-4:]", [SYSTEM, "does not print 14 of 18 messages of a conversation"]),
        (HISTORY % "[:5]", ["does not print 13 of 18 messages of a conversation"]),
        (HISTORY % " | reverse", ["prints the messages in another order"]),
        (HISTORY % " if m.role == 'user'", [ANSWERS, SYSTEM]),
    ],
)
def test_B06_a_history_that_is_cut_or_turned_round_is_named(template, expected):
    assert losses(template) == expected


QWEN3 = """
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content
+ '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for m in messages %}
{%- if m.role == "user" or (m.role == "system" and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- elif m.role == "assistant" %}
{%- set content = m.content %}{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and thought %}{{- '<think>' + thought + '</think>' }}{%- endif %}
{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{{- bos_token }}{%- for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim
+ '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{% set system = messages[0]['content'] %}
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\\n' + system
+ '\\n<</SYS>>\\n\\n' + m['content'] %}
{% else %}{% set content = m['content'] %}{% endif %}
{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
MISTRAL = """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}
{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}{%- for m in rest %}{%- if m.role == 'user' %}
{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + m.content
+ '[/INST]' }}
{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- else %}{{- raise_exception('Only user and assistant') }}{%- endif %}{%- endfor %}"""
GEMMA2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('alternate') }}{% endif %}
{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n'
+ m['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
GEMMA3 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
{%- if messages[0]['content'] is string -%}{%- set first = messages[0]['content'] + '\\n\\n' -%}
{%- else -%}{%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
{%- set rest = messages[1:] -%}
{%- else -%}{%- set first = "" -%}{%- set rest = messages -%}{%- endif -%}{%- for m in rest -%}
{{ '<start_of_turn>' + m.role + '\\n' + (first if loop.first else "") }}
{%- if m['content'] is string -%}{{ m['content'] | trim }}
{%- else -%}{%- for item in m['content'] -%}{%- if item['type'] == 'text' -%}
{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
{%- endif -%}{{ '<end_of_turn>\\n' }}{%- endfor -%}"""
SMOLLM = """{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}{% endif %}
{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"""
DEEPSEEK = """{% set ns = namespace(system='') %}{%- for m in messages %}
{%- if m['role'] == 'system' %}
{% set ns.system = m['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system}}
{%- for m in messages %}{%- if m['role'] == 'user' %}{{'<|User|>' + m['content']}}{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}{% set content = m['content'] %}
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{'<|Assistant|>' + content + '<|end|>'}}{%- endif %}{%- endfor -%}"""
USERS_ONLY = (
    IN_MESSAGES % "{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
)
ONE = (
    "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}"
)
JSON = "{{ messages | tojson }}{{ messages | tojson(ensure_ascii=True) }}"
REAL = {
    "Qwen3": QWEN3,
    "Llama 3": LLAMA3,
    "Llama 2": LLAMA2,
    "Mistral": MISTRAL,
    "Gemma 2": GEMMA2,
    "Gemma 3": GEMMA3,
    "SmolLM": SMOLLM,
    "DeepSeek R1": DEEPSEEK,
    "ChatML": IN_MESSAGES % "{{ m.content }}",
    "one turn": USERS_ONLY,
    "one message": ONE,
    "JSON": JSON,
    "JSON in ASCII": "{{ messages | tojson(ensure_ascii=True) }}",
    "a text in lines": IN_MESSAGES % "{% for l in m.content.split('\n') %}{{ l }}\n{% endfor %}",
    "twice": IN_MESSAGES % "{{ m.content }}{{ m.content }}",
}


@pytest.mark.parametrize("name", REAL)
def test_B06_templates_in_wide_use_lose_nothing(name):
    assert losses(REAL[name]) == []


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "hello", IN_MESSAGES % "{{ m.text }}"])
def test_B06_what_the_chat_check_finds_itself_is_not_found_twice(template):
    assert losses(template) == []


@pytest.mark.parametrize(
    "templates",
    [
        IN_MESSAGES % "{{ m.content[0] }}",
        {"default": REAL["ChatML"], "tool_use": IN_MESSAGES % OF_USER},
    ],
)
def test_B06_each_loss_is_one_warning_that_names_the_file(byte_level, monkeypatch, templates):
    monkeypatch.setattr(byte_level, "chat_template", templates)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_chat(Tokenizer(byte_level), "/models/m.gguf")
    name, ends = ("", [PART]) if isinstance(templates, str) else (" 'tool_use'", [ANSWERS, SYSTEM])
    seen = [str(each.message) for each in caught if "writes" not in str(each.message)]
    advice = "correct it there, or give the place of another tokenizer with tokenizer=…"
    assert seen == [f"the chat template{name} of /models/m.gguf {end}: {advice}" for end in ends]


@pytest.mark.parametrize(
    ("template", "faults"),
    [
        (IN_MESSAGES % "{{ m.content }}", []),
        (IN_MESSAGES % "{{ m.content[0] }}", [PART]),
        ("{{ messages | length }}", ["prints the text of no message"]),
        (IN_MESSAGES % "<|foo|>{{ m.content }}", ["writes <|foo|>, which the vocabulary does not"]),
    ],
)
def test_16_a_template_of_a_call_is_checked_once_as_one_at_load(scripted, template, faults):
    llm, messages = scripted(), [{"role": "user", "content": "hi"}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            llm.chat(messages, use_tqdm=False, chat_template=template)
        llm.stream_chat(messages, chat_template=template)
    seen = [str(each.message) for each in caught]
    assert len(seen) == len(faults)
    for text, fault in zip(seen, faults, strict=True):
        assert text.startswith(f"the chat_template of this call {fault}")
        assert text.endswith("correct it, or leave it out")
    assert {each.filename for each in caught} <= {__file__}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("messages", "options", "names"),
    [
        ([USER], {"tools": [TOOL]}, ["tools"]),
        ([USER, CALLS, USER], {}, ["tool_calls"]),
        ([USER, CALLS, USER], {"tools": [TOOL]}, ["tools", "tool_calls"]),
        ([USER], {"tools": []}, []),
        ([USER, {**CALLS, "tool_calls": []}], {}, []),
    ],
)
def test_tools_that_the_template_does_not_read_are_warned_of(byte_level, messages, options, names):
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    reading = plain + "{{ tools }}{{ messages[-1]['tool_calls'] }}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for template in plain, reading:
            rendering = Rendering(chat_template=template, **options)
            check_read(Tokenizer(byte_level), conversation_list([messages]), rendering)
    assert [str(each.message).split(",")[0] for each in caught] == [f"there are {n}" for n in names]
