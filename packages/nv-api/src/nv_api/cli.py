"""The `nv` command: complete prompts and chat in a terminal.

Owns the terminal: options, what is printed where, errors as one sentence. Everything else is
`LLM`'s, which is imported only when a model is wanted, so that help and version are fast.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from nv_engine import SamplingParams

    from nv_api.llm import LLM

DEMO = "demo"
DEMO_SENTENCE = (
    "No --model given: using the demo model, SmolLM2-135M-Instruct, which is small and often wrong."
)
USER_ERRORS = (ValueError, OSError, ImportError, MemoryError, RuntimeError)

app = typer.Typer(
    name="nv",
    help="Run a language model on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str | None, typer.Option(help="Folder, .gguf file or hub name.", show_default="demo")
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 takes the likeliest token.", show_default="the model's; demo: 0"),
]
TopP = Annotated[
    float | None, typer.Option(help="Mass of the likeliest tokens.", show_default="the model's")
]
Seed = Annotated[int | None, typer.Option(help="Makes the result repeatable.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def main() -> None:
    """Run the command line."""
    app()


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Run a language model on this machine."""
    if show_version:
        typer.echo(f"nv {version('nv-api')}")
        raise typer.Exit


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT…", help="Texts to go on with.")],
    *,
    model: Model = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Complete each PROMPT and print it with its completion."""
    with _errors_as_sentences():
        given = _given(model, max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        with _llm(model, dtype=dtype, device=device) as llm:
            outputs = llm.generate(prompts, replace(llm.get_default_sampling_params(), **given))
        completions = [output.outputs[0] for output in outputs]
        for prompt, completion in zip(prompts, completions, strict=True):
            typer.echo(prompt + completion.text)
        if failed := [each for each in completions if each.finish_reason == "error"]:
            raise RuntimeError(
                f"{len(failed)} prompts failed on the device: {failed[0].stop_reason}"
            )


@app.command()
def chat(
    *,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="A first message that sets the tone.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Chat line by line; Ctrl-C stops an answer, Ctrl-D or an empty line ends the chat."""
    with _errors_as_sentences():
        given = _given(model, max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        messages = [{"role": "system", "content": system}] if system else []
        with _llm(model, dtype=dtype, device=device) as llm:
            params = replace(llm.get_default_sampling_params(), **given)
            while line := _read_line():
                messages.append({"role": "user", "content": line})
                messages.append({"role": "assistant", "content": _answer(llm, messages, params)})


def _answer(llm: "LLM", messages: list[dict[str, str]], params: "SamplingParams") -> str:
    """Print an answer as it comes, up to its end or Ctrl-C, and return it."""
    pieces = []
    try:
        with closing(llm._stream_chat(messages, params)) as stream:
            for piece in stream:
                pieces.append(piece)
                typer.echo(piece, nl=False)
    except KeyboardInterrupt:
        typer.echo(" (stopped)", nl=False, err=True)
    typer.echo()
    return "".join(pieces)


def _read_line() -> str:
    """The next line; "" at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _llm(model: str | None, **options: Any) -> "LLM":  # noqa: ANN401
    """The model, loaded; where it is the demo model, a sentence on stderr says so."""
    from nv_api.llm import LLM  # noqa: PLC0415  # imports torch: seconds

    if model is None:
        typer.echo(DEMO_SENTENCE, err=True)
    return LLM(DEMO if model is None else model, **options)


def _given(model: str | None, max_tokens: int, **options: float | None) -> dict[str, Any]:
    """The sampling parameters that were given, checked before a model is loaded.

    The demo model is greedy unless told otherwise; others follow their own recommendation.
    """
    from nv_engine import SamplingParams  # noqa: PLC0415  # imports torch: seconds

    if model is None and options["temperature"] is None:
        options["temperature"] = 0.0
    given: dict[str, Any] = {n: value for n, value in options.items() if value is not None}
    SamplingParams(max_tokens=max_tokens, **given)
    return {"max_tokens": max_tokens, **given}


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """Print an error that the user can mend as one sentence, and exit with 1."""
    try:
        yield
    except USER_ERRORS as error:
        typer.echo(f"nv: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
