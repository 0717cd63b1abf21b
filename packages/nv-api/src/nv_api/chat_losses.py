"""Chat losses: what a chat template leaves out of a conversation, or changes in it.

Owns the conversation that is rendered to find this, and the words for each kind of loss. A template
may cut the spaces around a text, write it as JSON, refuse a role, remove thoughts and move the
system's message: templates in wide use do so. Never decides what follows from a loss.
"""

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from jinja2 import TemplateError

from nv_api.probe import TEMPLATE_ERRORS, Printed, conversation_of, form_of, probes_of, rendered

NUM_TURNS = 8
"""Pairs of a question and an answer before the last question."""
TURNS = ("user", "assistant") * NUM_TURNS + ("user",)
CONVERSATIONS = (("system", *TURNS), TURNS, ("system", "user"), ("user",))
"""A template that refuses one of them may take the next."""
NUM_LINES = 100
"""Lines of a message: a template that cuts texts to some length cuts it."""
LINE = "{probe} Say “Été” & <b>it's 2 < 3</b>,{probe}  twice: \\n{probe}"
"""A line has what templates that change texts change: case, quotes, tags, spaces, line breaks."""
CHANGES: dict[str, Callable[[str], str]] = {
    "in upper or lower case": str.casefold,
    "escaped as HTML": html.unescape,
    "with other spaces or line breaks": lambda text: "".join(text.split()),
}
"""Kinds of changes, each with a function that makes the text and its change equal."""


def losses(template: str) -> list[str]:
    """The losses of a template, in a conversation, each as the end of "the template …".

    A loss of all messages of the user is not among them: `chat_check` finds it in more ways.

    Args:
        template: Jinja without a syntax error.
    """
    form: Printed = "openai" if form_of(template) == "openai" else "string"
    for roles in CONVERSATIONS:
        texts = [_text(probe) for probe in probes_of(roles)]
        try:
            prompt = rendered(
                template, conversation_of(roles, form, texts), add_generation_prompt=True
            )
        except (TemplateError, *TEMPLATE_ERRORS):
            continue
        return [*_losses(roles, texts, prompt)]
    return []


def unread(template: str, names: Iterable[str]) -> list[str]:
    """Those of the names that a template does not have: it cannot read what they name.

    Args:
        template: Jinja.
        names: of variables, or of fields of a message.
    """
    return [name for name in names if not re.search(rf"\b{name}\b", template)]


def _text(probe: str) -> str:
    """The text of a message, which no other message has."""
    return "\n".join([LINE.format(probe=probe)] * NUM_LINES)


def _losses(roles: Sequence[str], texts: Sequence[str], prompt: str) -> Iterator[str]:
    """The losses of one conversation."""
    lost, changes = set[int](), set[str]()
    places: list[int] = []
    for index, (role, text, probe) in enumerate(zip(roles, texts, probes_of(roles), strict=True)):
        place = max(prompt.find(each) for each in _spellings(text))
        if place >= 0:
            places += [] if role == "system" else [place]
        elif probe in prompt:
            changes.add(_change(text, prompt))
        else:
            lost.add(index)
    gone = {role for role in roles if all(i in lost for i in range(len(roles)) if roles[i] == role)}
    if "user" in gone:
        return
    for role in sorted(gone):
        yield f"does not print the messages with the role {role!r}"
    if any(roles[index] not in gone for index in lost):
        yield f"does not print {len(lost)} of {len(roles)} messages of a conversation"
    if places != sorted(places):
        yield "prints the messages in another order"
    for change in sorted(changes):
        yield f"prints a message's text {change}"


def _spellings(text: str) -> tuple[str, str, str]:
    """A text as it is, and as JSON."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]


def _change(text: str, prompt: str) -> str:
    """The kind of change that a template makes of a text, as an adverb."""
    for kind, same in CHANGES.items():
        if same(text) in same(prompt):
            return kind
    return "only in part, or changed"
