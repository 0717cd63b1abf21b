"""Probe: the form of content that a chat template prints, found by rendering it.

Owns the conversations that are rendered for this. The syntax tree is read first
(`nv_api.template`): a probe decides where the tree does not show how a content is read.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from jinja2 import TemplateError

from nv_api import bounded_template
from nv_api.content import in_form
from nv_api.template import NUM_TEMPLATES, ContentForm, content_form

TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that the expressions of a template raise; jinja does not wrap them."""

ROLES = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("user", "assistant", "tool"),
)
"""The conversations: a template may refuse some of them, or print the messages of some roles."""

PRIVATE_USE = 0x100000
"""The first private character of Unicode. A probe is one such character: it stays whole where a
template reads a text character by character, and the repr of a part does not contain it."""

SPECIAL = (
    "bos_token",
    "cls_token",
    "eos_token",
    "mask_token",
    "pad_token",
    "sep_token",
    "unk_token",
)
VARIABLES = {**dict.fromkeys(SPECIAL, ""), "tools": None, "documents": None}
"""The special tokens, which a template may add to texts, and what a chat without tools passes."""

Printed = Literal["string", "openai"]
FORMS: tuple[Printed, ...] = ("string", "openai")


def form_of(template: str) -> ContentForm:
    """The form of content that a template gets: the one that it reads, or that it prints."""
    read = content_form(template)
    return printed_form(template) if read == "string" else read


@lru_cache(NUM_TEMPLATES)
def printed_form(template: str) -> Printed:
    """The form in which a template prints the contents of more messages; "string" if equal.

    Args:
        template: Jinja without a syntax error.
    """
    return max(FORMS, key=lambda form: sum(_num_printed(template, form, each) for each in ROLES))


def probes_of(roles: Sequence[str]) -> list[str]:
    """A probe for the message of each role."""
    return [chr(PRIVATE_USE + index) for index in range(len(roles))]


def rendered(
    template: str, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
) -> str:
    """The text that a template makes of messages.

    Raises:
        TemplateError, or one of TEMPLATE_ERRORS: the template refuses them.
    """
    return bounded_template.rendered(
        template,
        {"messages": messages, "add_generation_prompt": add_generation_prompt, **VARIABLES},
    )


def conversation_of(
    roles: Sequence[str], form: Printed, texts: Sequence[str]
) -> list[dict[str, Any]]:
    """A message of each role, with its text in a form."""
    return [
        {"role": role, "content": in_form(text, form)}
        for role, text in zip(roles, texts, strict=True)
    ]


def _num_printed(template: str, form: Printed, roles: tuple[str, ...]) -> int:
    """How many messages' contents are in the rendered text; 0 if the template refuses them."""
    probes = probes_of(roles)
    try:
        text = rendered(template, conversation_of(roles, form, probes))
    except (TemplateError, *TEMPLATE_ERRORS):
        return 0
    return sum(probe in text for probe in probes)
