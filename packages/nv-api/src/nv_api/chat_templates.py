"""Chat templates: the files of a folder that hold them, and the check that they are Jinja.

Never renders a template.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import TemplateSyntaxError
from nv_engine.values import shown
from nv_models.fields import read_json
from nv_models.missing import is_there, why_missing

from nv_api.bounded_template import compiled

ADVICE = "correct it there, or give the place of another tokenizer with tokenizer=…"
Templates: TypeAlias = str | dict[str, str] | None
"""One template, several by name ("default", "tool_use", ...), or None."""


def template_of(folder: Path) -> Templates:
    """The chat templates of a folder.

    chat_template.jinja and additional_chat_templates/NAME.jinja win over `chat_template` in
    tokenizer_config.json (as in transformers), which wins over chat_template.json (of older
    processors).

    Raises:
        FileNotFoundError: a template's file that is a folder, a pipe or a dead link.
        ValueError: a `chat_template` that is neither a text nor a list of named texts.
    """
    alone = folder / "chat_template.jinja"
    files = {"default": alone} if is_there(alone) else {}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files |= {file.stem: file for file in more}
    if files:
        for file in files.values():
            if not file.is_file():
                raise FileNotFoundError(f"{file} {why_missing(file, 'does not exist')}")
        texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        return texts["default"] if texts.keys() == {"default"} else texts
    for name in ("tokenizer_config.json", "chat_template.json"):
        values = read_json(folder / name) if is_there(folder / name) else {}
        if given := values.get("chat_template"):
            return _checked(given, folder / name)
    return None


def _checked(given: object, file: Path) -> Templates:
    """A text, or the named texts of a list of {"name": …, "template": …}."""
    if isinstance(given, str):
        return given
    named: dict[Any, Any] = {}
    if isinstance(given, list) and all(isinstance(each, Mapping) for each in given):
        named = {each.get("name"): each.get("template") for each in given}
    elif isinstance(given, Mapping):
        named = dict(given)
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ValueError(
            f"{file}: chat_template is {shown(given)}: it must be a text, or a list of objects "
            "with name and template"
        )
    return named


def check_templates(templates: Templates, source: Path | str, advice: str = ADVICE) -> None:
    """Refuse a template that could not be rendered whatever the messages.

    Args:
        templates: of a model, or of an option.
        source: where they are.
        advice: what to do about one that is not Jinja.

    Raises:
        ValueError: one is not Jinja.
    """
    named = templates if isinstance(templates, dict) else {"default": templates}
    for name, text in named.items():
        try:
            if text:
                compiled(text)
        except TemplateSyntaxError as error:
            which = "" if name == "default" else f" {name!r}"
            raise ValueError(
                f"the chat template{which} of {source} is not a Jinja template (line "
                f"{error.lineno}: {error.message}): {advice}"
            ) from error
