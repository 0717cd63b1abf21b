"""The bounds of a chat template's writing and counting, which change nothing else."""

import time

import pytest
from jinja2 import TemplateRuntimeError
from nv_api.bounded_template import MOST_OWN, rendered
from transformers.utils.chat_template_utils import render_jinja_template

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x" * 50}]
VARIABLES = {"messages": MESSAGES, "tools": None, "documents": None, "add_generation_prompt": True}


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ 'a' * 10**10 }}", OverflowError, "times 10000000000 has more than 1048576 items"),
        ("{{ 10**9 * [1] }}", OverflowError, "times 1000000000 has more"),
        ("{{ 9 ** 99999 }}", OverflowError, "exponent is 99999: it must be at most 1000"),
        ("{{ range(10**30) }}", OverflowError, "counts further than 1000000"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            OverflowError,
            "counts further than 1000000",
        ),
        (
            "{% set n = namespace(s='a') %}{% for i in range(30) %}{% set n.s = n.s + n.s %}"
            "{% endfor %}",
            OverflowError,
            "the sum of two texts or lists has more than",
        ),
        ("{% for i in range(1100) %}{{ 'a' * 1000 }}{% endfor %}", TemplateRuntimeError, "writes"),
        ("{{ 'a'|center(2000000) }}", TemplateRuntimeError, "it writes more than 10"),
    ],
)
def test_16_what_a_template_writes_and_counts_is_bounded(template, error, message):
    began = time.monotonic()
    with pytest.raises(error, match=message):
        rendered(template, VARIABLES)
    assert time.monotonic() - began < 5


def test_16_a_long_conversation_may_be_written():
    messages = [{"role": "user", "content": "x" * MOST_OWN}] * 3
    text = rendered(
        "{% for m in messages %}{{ m.content + '.' }}{% endfor %}", {"messages": messages}
    )
    assert text == ("x" * MOST_OWN + ".") * 3


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '-' * 3 + m.role + 2 ** 3 * 'a' }}\n{{ m|tojson }}{% endfor %}",
        "{% for i in range(5, 0, -2) %}{{ i }}{% break %}{% endfor %}{{ range(0) | list }}",
        "{% macro f(n) %}{% for i in range(n) %}{{ i * 1.5 }}{% endfor %}{% endmacro %}{{ f(3) }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "{{ [1] + [2] }}{{ (1,) * 2 }}{{ -1 * 'a' }}{{ true * 3 }}{{ 2 ** -1 }}",
    ],
)
def test_16_the_text_within_the_bounds_is_that_of_transformers(template):
    (expected,), _ = render_jinja_template(
        [MESSAGES],
        chat_template=template,
        **{name: value for name, value in VARIABLES.items() if name != "messages"},
    )
    assert rendered(template, VARIABLES) == expected
