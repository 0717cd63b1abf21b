"""Chat check: what is wrong with a chat template, found at load by rendering it.

Owns the conversations for this, and which faults are errors: those with which no conversation can
be right. A checkpoint may be usable without its template, or with other roles and fields than those
of `LLM.chat`: such faults are warnings.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError
from nv_engine.user_line import warn_user
from nv_models.listing import first_few

from nv_api.chat_losses import losses
from nv_api.probe import FORMS, ROLES, TEMPLATE_ERRORS, conversation_of, probes_of, rendered
from nv_api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nv_api.chat_templates import Templates

WORD = re.compile(r"<[|｜][^\s<>|｜]+[|｜]>|<(?:start|end)_of_\w+>|</?s>")  # noqa: RUF001
"""Words that are one token each in the models whose templates write them: <|im_start|>, </s>."""
PLAIN = frozenset(f"<|{role}|>" for roles in ROLES for role in roles)
"""Words that Zephyr, TinyLlama and OLMo were trained to read as several tokens."""
LENGTH = 8
"""Characters of a message's text."""
DEFAULT = "the chat template of"
"""The name of the template that every chat uses begins with this."""
TEXTS = ("Hello", "What is 2 + 2?")
"""Two texts, of which a template that reads messages makes two prompts."""
ADVICE = "correct it there, or give the place of another tokenizer with tokenizer=…"

GIVEN, GIVEN_ADVICE = "the chat_template of this call", "correct it, or leave it out"
CUT = (
    "{} writes {}, which the vocabulary does not have as single tokens: if the model was not "
    "trained with such words cut into several tokens, {}"
)


class _Rendered(NamedTuple):
    """A conversation's roles, and the text that a template made of it."""

    roles: Sequence[str]
    text: str

    def printed(self) -> set[str]:
        """The roles whose messages are in the text."""
        probes = probes_of(self.roles)
        return {role for role, probe in zip(self.roles, probes, strict=True) if probe in self.text}


class _AnyName(str):
    """A text that equals every other: of whatever role a template prints, this is one."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Always."""
        return True

    def __ne__(self, other: object) -> bool:
        """Never."""
        return False

    __hash__ = str.__hash__


class _AnyMessage(dict[str, Any]):
    """A message that has every field, each with the same text."""

    def __init__(self, text: str) -> None:
        super().__init__(role=_AnyName("user"), content=text)

    def __missing__(self, field: str) -> str:
        """A field that a chat's messages do not have."""
        return _AnyName(self["content"])


def check_chat(tokenizer: Tokenizer, source: Path | str) -> None:
    """Check the chat templates of a tokenizer, each of which is Jinja.

    Args:
        tokenizer: the tokenizer, with its templates.
        source: the file or folder that the user can correct.

    Raises:
        ValueError: a template that prints the text of no message, whatever its role and fields.

    Warns:
        UserWarning: a default template that fails on a user's message; a template that does not
            print it; one that loses or changes other parts of a conversation; or one with control
            words that are not tokens.
    """
    templates: Templates = tokenizer.backend.chat_template
    named = templates if isinstance(templates, dict) else {"default": templates}
    for name, template in named.items():
        if template:
            start = DEFAULT if name == "default" else f"the chat template {name!r} of"
            _check(template, f"{start} {source}", tokenizer)


def check_given(template: str | None, tokenizer: Tokenizer | None) -> None:
    """Check a template that a call gives in place of the tokenizer's; warn of each only once.

    Args:
        template: may be None, the name of one of the tokenizer's, or not Jinja, which rendering it
            reports.
        tokenizer: remembers the templates that were checked.

    Warns:
        UserWarning: as `check_chat`, also where that raises, as the call may have what the template
            prints (tool calls alone). Not that it fails on a user's message: the call itself raises
            if it fails on its messages.
    """
    if template is None or tokenizer is None or not ("{{" in template or "{%" in template):
        return
    if tokenizer.is_checked(template):
        return
    try:
        faults = template_faults(template, GIVEN, GIVEN_ADVICE)
    except ValueError as error:
        faults = [str(error)]
    if words := _cut_words(_rendered(template)[0], tokenizer):
        faults.append(CUT.format(GIVEN, ", ".join(first_few(words)), GIVEN_ADVICE))
    tokenizer.note_checked(template)
    for fault in faults:
        warn_user(fault)


def _check(template: str, subject: str, tokenizer: Tokenizer) -> None:
    """Check one template; `subject` is its name in messages."""
    done, error = _rendered(template)
    if error and subject.startswith(DEFAULT):  # others may need tools or documents
        warn_user(f"{subject} fails on a user's message ({error}): {ADVICE}")
    for fault in template_faults(template, subject, ADVICE):
        warn_user(fault)
    if words := _cut_words(done, tokenizer):
        warn_user(CUT.format(subject, ", ".join(first_few(words)), ADVICE))


def template_faults(template: str, subject: str, advice: str) -> list[str]:
    """The sentences to warn of: each part of a conversation that a template loses.

    Args:
        template: Jinja without a syntax error.
        subject: its name in the sentences.
        advice: the fix, which ends them.

    Raises:
        ValueError: it prints the text of no message, whatever its role and fields.
    """
    done, _ = _rendered(template)
    if done and not any(each.printed() for each in done) and not _reads_messages(template):
        raise ValueError(f"{subject} prints the text of no message: {advice}")
    faults = [f"{subject} {loss}: {advice}" for loss in losses(template)]
    if done and not any("user" in each.printed() for each in done):
        faults.append(
            f"{subject} does not print the content of a message with the role 'user', so that the "
            f"model does not see it: {advice}"
        )
    return faults


def _rendered(template: str) -> tuple[list[_Rendered], str]:
    """The texts of all conversations that a template takes; if there are none, its error."""
    done: list[_Rendered] = []
    errors: list[str] = []
    for roles, form in product(ROLES, FORMS):
        # Longer than a probe, so that something of it is left where a template cuts a text.
        texts = [LENGTH * probe for probe in probes_of(roles)]
        try:
            text = rendered(
                template, conversation_of(roles, form, texts), add_generation_prompt=True
            )
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            done.append(_Rendered(roles, text))
    return done, "" if done else errors[0]


def _reads_messages(template: str) -> bool:
    """Whether the prompt depends on the texts of messages, of whatever role and field.

    A reranker's template prints a "query", and that of other conversations "from" and "value".
    """
    one, other = (
        [
            _text(template, [_AnyMessage(text)]),
            *(
                _text(template, conversation_of(roles, form, [text] * len(roles)))
                for roles, form in product(ROLES, FORMS)
            ),
        ]
        for text in TEXTS
    )
    return one != other or one[0] is None  # it may read what it failed at


def _text(template: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The text that a template makes of messages; None if it refuses them."""
    try:
        return rendered(template, messages, add_generation_prompt=True)
    except (TemplateError, *TEMPLATE_ERRORS):
        return None


def _cut_words(done: Sequence[_Rendered], tokenizer: Tokenizer) -> list[str]:
    """The control words of the texts that the tokenizer cuts into several tokens."""
    words = dict.fromkeys(word for each in done for word in WORD.findall(each.text))
    kept = [word for word in words if word not in PLAIN]
    ids = tokenizer.encode(kept, add_special_tokens=False)
    return [
        word
        for word, its_ids in zip(kept, ids, strict=True)
        if word not in tokenizer.backend.convert_ids_to_tokens(its_ids)
    ]
