"""Sentences: errors of a command as one sentence on stderr.

Owns which errors a user can correct; any other is a fault, and keeps its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

USER_ERRORS = (ValueError, OSError, ImportError, MemoryError, RuntimeError)
UNKNOWN_OPTION = "LLM has no option "
"""The beginning of the TypeError for an option that is not known."""


def sentence(error: BaseException) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print an error that the user can correct as one sentence, and exit with 1."""
    try:
        yield
    except USER_ERRORS as error:
        typer.echo(f"nv: {sentence(error)}", err=True)
        raise typer.Exit(1) from None
    except TypeError as error:
        if not str(error).startswith(UNKNOWN_OPTION):
            raise
        option = str(error).removeprefix(UNKNOWN_OPTION)
        typer.echo(f"nv: unknown option {option}", err=True)
        raise typer.Exit(1) from None


@contextmanager
def extra(command: str, name: str) -> Iterator[None]:
    """Name the extra of nv-api that a command needs if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f'{command} needs {error.name}: pip install "nv-api[{name}]"') from error
