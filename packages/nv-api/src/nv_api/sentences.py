"""Sentences: errors of a command as one sentence on stderr.

Owns which errors a user can correct; any other is a fault, and keeps its traceback.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

USER_ERRORS = (ValueError, OSError, ImportError, MemoryError, RuntimeError)
UNKNOWN_OPTION = "LLM has no option "
"""The beginning of the TypeError for an option that is not known."""
TWO_NAMES = ": give one of them"
"""The end of the TypeError for an option that is given by two of its names."""


def sentence(error: BaseException) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())


def json_object(name: str, text: str) -> dict[str, Any]:
    """The object that an option has as JSON.

    Raises:
        ValueError: the text is not one.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        from nv_engine.values import shown  # noqa: PLC0415  # imports torch: seconds

        raise ValueError(f"{name} is {shown(text)}: it must be a JSON object")
    return found


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print an error that the user can correct as one sentence, and exit with 1."""
    try:
        yield
    except USER_ERRORS as error:
        typer.echo(f"nv: {sentence(error)}", err=True)
        raise typer.Exit(1) from None
    except TypeError as error:
        text = sentence(error)
        if not text.startswith(UNKNOWN_OPTION) and not text.endswith(TWO_NAMES):
            raise
        if text.startswith(UNKNOWN_OPTION):
            text = f"unknown option {text.removeprefix(UNKNOWN_OPTION)}"
        typer.echo(f"nv: {text}", err=True)
        raise typer.Exit(1) from None


@contextmanager
def extra(owner: str, name: str) -> Iterator[None]:
    """Name the extra of nv-api that a command or an option needs if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f'{owner} needs {error.name}: pip install "nv-api[{name}]"') from error
