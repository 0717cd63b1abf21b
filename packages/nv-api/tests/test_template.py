"""Which form of content a template reads: whole templates' ways, each cut to what matters."""

import pytest
from nv_api.probe import printed_form
from nv_api.template import content_form

IN_MESSAGES = "{%% for m in messages %%}%s{%% endfor %%}"
LOOP = "{% for c in m.content %}{{ c.text }}{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}"


@pytest.mark.parametrize(
    "body",
    [
        LOOP,
        "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}",
        "{% for c in m.get('content', []) %}{{ c.text }}{% endfor %}",
        "{% for c in m.content or [] %}{{ c.text }}{% endfor %}",
        "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c }}{% endfor %}",
        "{% set x = m.content %}{% for c in x[1:] %}{{ c.text }}{% endfor %}",
        "{{ m.content | map(attribute='text') | join }}",
        "{{ m.content | join('', attribute='text') }}",
        "{{ m.content[0].text }}",
        "{{ (m.content | first)['text'] }}",
        "{% generation %}" + LOOP + "{% endgeneration %}{% continue %}",
        # a test that does not cover the loop
        "{% if m.role == 'tool' and m.content is string %}x{% else %}" + LOOP + "{% endif %}",
        "{% if m.content is string %}x{% endif %}" + LOOP,
        "{% if m.content is string or m.content is none %}" + LOOP + "{% endif %}",
    ],
)
def test_b06_a_loop_over_a_content_reads_parts(body):
    assert content_form(IN_MESSAGES % body) == "openai"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages[1:] | rejectattr('role', 'equalto', 'system') %}"
        + LOOP
        + "{% endfor %}",
        "{% for i in range(9) %}{% set m = messages[i] %}" + LOOP + "{% endfor %}",
        "{% set all = [x] + messages %}{% for m in all %}" + LOOP + "{% endfor %}",
        "{% set ns = namespace(all=messages) %}{% for m in ns.all %}" + LOOP + "{% endfor %}",
        "{% set ns = namespace(x=none) %}{% for m in messages %}{% set ns.x = m.content %}"
        "{% for c in ns.x %}{{ c.text }}{% endfor %}{% endfor %}",
        "{% macro show(parts) %}{% for c in parts %}{{ c.text }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "{% macro show(m) %}" + LOOP + "{% endmacro %}{{ show(m=messages[0]) }}",
        "{{ messages[0]['content'][0]['text'] }}",
        "{% for m in [messages[0]] %}" + LOOP + "{% endfor %}",
        IN_MESSAGES
        % ("{% with c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}{% endwith %}"),
        IN_MESSAGES % "{% set c, r = m.content, m.role %}{% for p in c %}{{ p.text }}{% endfor %}",
    ],
)
def test_b06_a_content_is_followed_through_names(template):
    assert content_form(template) == "openai"


@pytest.mark.parametrize(
    "body",
    [
        EITHER,
        "{% if m.content is not string %}" + LOOP + "{% else %}{{ m.content }}{% endif %}",
        "{% if m.content is iterable and m.content is not string %}" + LOOP + "{% endif %}",
        "{% if m.role == 'x' %}y{% elif m.content is string %}x{% elif z %}" + LOOP + "{% endif %}",
        "{% if m.content is string or z %}x{% else %}" + LOOP + "{% endif %}",
        "{{ m.content if m.content is string else m.content | map(attribute='text') | join }}",
        "{{ m.content is not string and m.content[0].type == 'image' }}",
    ],
)
def test_b06_a_loop_that_a_test_keeps_strings_from_takes_either(body):
    assert content_form(IN_MESSAGES % body) == "either"


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content | trim }}",
        "{{ m.content | join(', ') }}",
        "{{ m.content[0] }}{{ m.content[1:] }}",
        "{% for line in m.content.split('x') %}{{ line }}{% endfor %}",
        "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}",
        "{% set content = m.content if m.content is string else '' %}{{ content }}",
        "{% for t in tools %}{% for c in t.content %}{{ c }}{% endfor %}{% endfor %}",
        "{% syntax error",
    ],
)
def test_b06_other_templates_read_strings(body):
    assert content_form("{% for m in messages %}" + body + "{% endfor %}") == "string"


SHOW = "{% for p in c %}{{ p.text }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for c in messages | map(attribute='content') %}" + SHOW + "{% endfor %}",
        IN_MESSAGES
        % ("{% for k, c in m.items() %}{% if k == 'content' %}" + SHOW + "{% endif %}{% endfor %}"),
        "{% set k = 'content' %}" + IN_MESSAGES % ("{% set c = m[k] %}" + SHOW),
        IN_MESSAGES % ("{% macro show(c=m.content) %}" + SHOW + "{% endmacro %}{{ show() }}"),
        "{% macro w(m) %}{{ caller(m.content) }}{% endmacro %}"
        + IN_MESSAGES % ("{% call(c) w(m) %}" + SHOW + "{% endcall %}"),
        # a user's content as text, an assistant's as parts; and messages that it refuses
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        + IN_MESSAGES
        % (
            "{{ bos_token + m.role }}{% if m.role == 'user' %}{{ m.content }}"
            "{% else %}{% for c in [m] | map(attribute='content') %}" + SHOW + "{% endfor %}"
            "{% endif %}"
        ),
    ],
)
def test_b06_a_probe_finds_parts_that_the_tree_does_not_show(template):
    assert content_form(template) == "string"
    assert printed_form(template) == "openai"


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content | trim }}",
        "{{ m.content | join(', ') }}",
        "{{ m.content[0] }}{{ m.content[1:] }}",
        "{% for k, v in m.items() %}{{ v }}{% endfor %}",
        "{{ m | tojson }}",
        "{{ m.role }}",
        "{{ raise_exception('no') }}",
        "{{ m.role + 1 }}",
    ],
)
def test_b06_a_probe_keeps_text_where_parts_print_no_more(body):
    assert printed_form(IN_MESSAGES % body) == "string"


def test_the_form_of_a_template_is_found_once():
    content_form.cache_clear()
    for _ in range(3):
        content_form(IN_MESSAGES % LOOP)
    assert (content_form.cache_info().misses, content_form.cache_info().hits) == (1, 2)
