"""Chat check: what is wrong with a chat template, found at load by rendering it.

Owns the conversations for this, and which faults are errors: those with which no conversation can
be right. A checkpoint may be usable without its template, or with other roles and fields than those
of `LLM.chat`: such faults are warnings.
"""

import re
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError
from nv_models.listing import first_few

from nv_api.probe import FORMS, ROLES, TEMPLATE_ERRORS, conversation_of, probe, rendered
from nv_api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nv_api.chat_templates import Templates

WORD = re.compile(r"<[|｜][^\s<>|｜]+[|｜]>|<(?:start|end)_of_\w+>|</?s>")  # noqa: RUF001
"""Words that are one token each in the models whose templates write them: <|im_start|>, </s>."""
PLAIN = frozenset(f"<|{role}|>" for roles in ROLES for role in roles)
"""Words that Zephyr, TinyLlama and OLMo were trained to read as several tokens."""
ADVICE = "correct it there, or give the place of another tokenizer with tokenizer=…"


class _Rendered(NamedTuple):
    """A conversation's roles, and the text that a template made of it."""

    roles: Sequence[str]
    text: str

    def printed(self) -> set[str]:
        """The roles whose messages are in the text."""
        return {role for index, role in enumerate(self.roles) if probe(index) in self.text}


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

    def __missing__(self, field: str) -> str:
        """A field that a chat's messages do not have."""
        return _AnyName(probe(0))


def check_chat(tokenizer: Tokenizer, source: Path | str) -> None:
    """Check the chat templates of a tokenizer, each of which is Jinja.

    Args:
        tokenizer: the tokenizer, with its templates.
        source: the file or folder that the user can correct.

    Raises:
        ValueError: a template that prints the text of no message, whatever its role and fields.

    Warns:
        UserWarning: a default template that fails on a user's message; a template that does not
            print it; or one with control words that are not tokens.
    """
    templates: Templates = tokenizer.backend.chat_template
    named = templates if isinstance(templates, dict) else {"default": templates}
    for name, template in named.items():
        if not template:
            continue
        subject = f"the chat template{'' if name == 'default' else f' {name!r}'} of {source}"
        done, error = _rendered(template)
        if error and name == "default":  # others may need tools or documents
            warnings.warn(f"{subject} fails on a user's message ({error}): {ADVICE}", stacklevel=4)
        if done and not any(each.printed() for each in done) and not _prints_any(template):
            raise ValueError(f"{subject} prints the text of no message: {ADVICE}")
        if done and not any("user" in each.printed() for each in done):
            warnings.warn(
                f"{subject} does not print the content of a message with the role 'user', so that "
                f"the model does not see it: {ADVICE}",
                stacklevel=4,
            )
        if words := _cut_words(done, tokenizer):
            warnings.warn(
                f"{subject} writes {', '.join(first_few(words))}, which the vocabulary does not "
                "have as single tokens: if the model was not trained with such words cut into "
                f"several tokens, {ADVICE}",
                stacklevel=4,
            )


def _rendered(template: str) -> tuple[list[_Rendered], str]:
    """The texts of all conversations that a template takes; if there are none, its error."""
    done: list[_Rendered] = []
    errors: list[str] = []
    for roles, form in product(ROLES, FORMS):
        try:
            text = rendered(template, conversation_of(roles, form), add_generation_prompt=True)
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            done.append(_Rendered(roles, text))
    return done, "" if done else errors[0]


def _prints_any(template: str) -> bool:
    """Whether a template prints a message of some role and some field.

    Such are the templates of rerankers ("query"), and of conversations with "from" and "value".
    """
    message = _AnyMessage(role=_AnyName("user"), content=probe(0))
    try:
        return probe(0) in rendered(template, [message])
    except (TemplateError, *TEMPLATE_ERRORS):
        return True  # not known


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
