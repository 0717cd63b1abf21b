"""The `nv` command: complete prompts and chat in a terminal.

Owns the terminal: options, output, and errors as one sentence. `LLM` does the rest; it is imported
only when a model is needed, so that help and version are fast.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from nv_api.bench.command import app as bench
from nv_api.repetition import repeated_end
from nv_api.sentences import errors_as_sentences, extra, json_object, sentence

if TYPE_CHECKING:
    from nv_engine import LoRARequest, SamplingParams

    from nv_api.llm import LLM

DEMO = "demo"
DEMO_CHAT = {"temperature": 0.2, "top_p": 0.9}
"""The sampling that the demo model's authors recommend."""
DEMO_COMPLETION = {"temperature": 0.0}
DEMO_SENTENCE = (
    "No --model given: using the demo model, SmolLM2-135M-Instruct, which is small and often wrong."
)
FORGET = "/clear"
ENGINE_OPTIONS = (
    "dtype",
    "device",
    "tensor_parallel_size",
    "max_model_len",
    "gpu_memory_utilization",
    "quantization",
    "kv_cache_dtype",
    "enforce_eager",
)
TEXTS = ("revision", "tokenizer", "tokenizer_revision", "download_dir")
"""Options of other commands whose words are texts, though they may look like numbers."""
MAX_SEQUENCES = 2**31 - 1
"""That may wait in a batch: its own number of lines in flight is the limit."""

app = typer.Typer(
    name="nv",
    help="Run a language model on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Adapter = Annotated[
    str | None, typer.Option("--lora", metavar="NAME=PATH", help="An adapter, as peft saves it.")
]
LORA_MODULES = "--lora-modules"
LoRAModules = Annotated[
    list[str] | None,
    typer.Option(
        LORA_MODULES,
        metavar="NAME=PATH ...",
        help="Adapters that requests select by name, as they do a model.",
    ),
]


class ServingCommand(TyperCommand):
    """A command whose `--lora-modules` takes several values, as vLLM's does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  # of typer's click
        """Name the option before each of its values."""
        return super().parse_args(ctx, spread(args))


def spread(words: list[str]) -> list[str]:
    """A command line with `--lora-modules` before each value that follows it."""
    found: list[str] = []
    is_list = False
    for place, word in enumerate(words):
        is_value = not word.startswith("-") and ("=" in word or word.lstrip().startswith("{"))
        if is_list and is_value and words[place - 1] != LORA_MODULES:
            found.append(LORA_MODULES)
        is_list = word.partition("=")[0] == LORA_MODULES or (is_list and is_value)
        found.append(word)
    return found


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of every command."""

    model: Annotated[
        str | None, typer.Option(help="Folder, .gguf file or hub name.", show_default="demo")
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 takes the likeliest token.",
            show_default="the model's; demo: 0, in chat 0.2",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Mass of the likeliest tokens.", show_default="the model's; demo: 1, in chat 0.9"
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Makes the result repeatable.")] = None
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    tensor_parallel_size: Annotated[int, typer.Option(help="Cards that share the model.")] = 1
    max_model_len: Annotated[int, typer.Option(help="Most tokens of prompt and answer.")] = 4096
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of a card to use.")] = 0.9
    quantization: Annotated[
        str | None,
        typer.Option(help="fp8 quantizes a model in floats.", show_default="the model's"),
    ] = None
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or fp8.")] = "auto"
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False

    @contextmanager
    def start(
        self, max_tokens: int, demo: dict[str, float], lora: "LoRARequest | None" = None
    ) -> "Iterator[tuple[LLM, SamplingParams]]":
        """The loaded model and its sampling parameters; an error is one sentence and exit code 1.

        Options come first, then `demo` for the demo model, then the checkpoint's recommendation.
        If no model was given, a sentence on stderr says that the demo model is used. With `lora`
        the model has room for that adapter.
        """
        with errors_as_sentences():
            given = self._sampling(max_tokens, demo)
            if self.model is None:
                typer.echo(DEMO_SENTENCE, err=True)
            from nv_api.llm import LLM  # noqa: PLC0415  # imports torch: seconds

            model = DEMO if self.model is None else self.model
            asked = {name: getattr(self, name) for name in ENGINE_OPTIONS}
            changed = {n: value for n, value in asked.items() if value != getattr(Settings, n)}
            if lora is not None:
                changed |= {"enable_lora": True, "max_lora_rank": rank_of(lora)}
            with LLM(model, **changed) as llm:
                yield llm, replace(llm.get_default_sampling_params(), **given)

    def _sampling(self, max_tokens: int, demo: dict[str, float]) -> dict[str, Any]:
        """The given sampling parameters, checked before a model is loaded."""
        from nv_engine import SamplingParams  # noqa: PLC0415  # imports torch: seconds

        named = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        given: dict[str, Any] = {"max_tokens": max_tokens}
        if self.model in (None, DEMO):
            given |= demo
        given |= {name: value for name, value in named.items() if value is not None}
        SamplingParams(**given)
        return given


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `Settings`, a command's first argument, after the command's own."""
    shared = inspect.signature(Settings).parameters

    @wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401
        settings = Settings(**{name: given.pop(name) for name in shared})
        command(settings, **given)

    _, *own = inspect.signature(command).parameters.values()
    run.__signature__ = inspect.Signature([*own, *shared.values()])  # type: ignore[attr-defined]
    return run


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
@_with_settings
def generate(
    settings: Settings,
    *,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Texts to complete.")],
    max_tokens: MaxTokens = 64,
    lora: Adapter = None,
) -> None:
    """Complete each PROMPT and print it with its completion."""
    with errors_as_sentences():
        adapter = None if lora is None else _adapter(lora)
    with settings.start(max_tokens, DEMO_COMPLETION, adapter) as (llm, params):
        outputs = llm.generate(prompts, params, lora_request=adapter)
        completions = [output.outputs[0] for output in outputs]
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), 1):
            if len(prompts) == 1:
                typer.echo(prompt + completion.text)
            else:
                typer.echo(f"--- prompt {number} of {len(prompts)} ---\n{prompt}")
                typer.echo(f"--- completion ---\n{completion.text}\n")
        if failed := [each for each in completions if each.finish_reason == "error"]:
            raise RuntimeError(
                f"{len(failed)} prompts failed on the device: {failed[0].stop_reason}"
            )


def _adapter(text: str) -> "LoRARequest":
    """The adapter of NAME=PATH."""
    from nv_engine import LoRARequest  # noqa: PLC0415  # imports torch: seconds

    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"--lora is {text!r}: it must be NAME=PATH")
    return LoRARequest(name, 1, path)


def rank_of(lora: "LoRARequest") -> int:
    """The largest rank of an adapter, whose files are checked before a model loads."""
    from nv_models.adapters import largest_rank  # noqa: PLC0415  # imports torch: seconds

    return largest_rank(lora.lora_path)


@app.command()
@_with_settings
def chat(
    settings: Settings,
    *,
    system: Annotated[str | None, typer.Option(help="A first message that sets the tone.")] = None,
    max_tokens: MaxTokens = 512,
    lora: Adapter = None,
) -> None:
    """Chat line by line; Ctrl-C stops an answer, /clear forgets, Ctrl-D or an empty line ends.

    An answer that repeats itself is stopped.
    """
    first = [{"role": "system", "content": system}] if system else []
    messages = first
    with errors_as_sentences():
        adapter = None if lora is None else _adapter(lora)
    with settings.start(max_tokens, DEMO_CHAT, adapter) as (llm, params):
        answer: str | None = ""
        for line in iter(_read_line, ""):
            if line == FORGET:
                messages = first
                continue
            asked = [*messages, {"role": "user", "content": line}]
            answer = _answer(llm, asked, params, adapter)
            if answer is not None:
                messages = [*asked, {"role": "assistant", "content": answer}]
    if answer is None:
        raise typer.Exit(1)


@app.command(
    cls=ServingCommand,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(
    context: typer.Context,
    *,
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub name or demo.")] = DEMO,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    uds: Annotated[str | None, typer.Option(help="A socket's path, for a proxy.")] = None,
    root_path: Annotated[str, typer.Option(help="What a proxy cuts from paths.")] = "",
    ssl_keyfile: Annotated[str | None, typer.Option(help="Key of the certificate.")] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="Certificate.")] = None,
    ssl_keyfile_password: Annotated[str | None, typer.Option(help="Of the key.")] = None,
    ssl_ca_certs: Annotated[str | None, typer.Option(help="Certificates of clients.")] = None,
    keep_alive: Annotated[float, typer.Option(help="Seconds of an idle connection.")] = 75.0,
    head_timeout: Annotated[float, typer.Option(help="Seconds for a request's head.")] = 30.0,
    body_timeout: Annotated[float, typer.Option(help="Seconds for a request's body.")] = 120.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that requests need; several may be given.", envvar="NV_API_KEY"),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="A name of the model; several may be given.")
    ] = None,
    lora_modules: LoRAModules = None,
    allow_runtime_lora_updating: Annotated[
        bool,
        typer.Option(
            "--allow-runtime-lora-updating", help="Clients may load adapters, from any folder."
        ),
    ] = False,
    allowed_origins: Annotated[
        list[str] | None, typer.Option(help="Web pages that may call; *: all.")
    ] = None,
    generation_config: Annotated[
        str, typer.Option(help="nv: the checkpoint's recommendation is not used.")
    ] = "auto",
    override_generation_config: Annotated[
        str,
        typer.Option(
            help='JSON: values for fields that requests leave out, such as {"temperature": 0.5}.',
            show_default="none; demo: temperature 0.2, top_p 0.9",
        ),
    ] = "{}",
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="File with a Jinja template.",
            show_default="the model's own",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="Finds thoughts; none: off.", show_default="of the chat template"),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="Finds calls of tools; none: off.", show_default="of the chat template"),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Most sequences that wait.")] = 1024,
    max_body_bytes: Annotated[str, typer.Option(help="Of a request.")] = "32M",
    max_n: Annotated[int, typer.Option(help="Most completions of a prompt.")] = 128,
    max_logprobs: Annotated[int, typer.Option(help="Most per token.")] = 20,
    max_grammar_bytes: Annotated[str, typer.Option(help="Of a schema or grammar.")] = "64k",
    request_timeout: Annotated[float, typer.Option(help="Seconds of a request.")] = 600.0,
    write_timeout: Annotated[float, typer.Option(help="Seconds a client may not read.")] = 60.0,
    drain_seconds: Annotated[float, typer.Option(help="Longest wait at the end.")] = 30.0,
    ping_interval: Annotated[
        float | None, typer.Option(help="Seconds between comments in a silent stream.")
    ] = None,
    log_requests: Annotated[str, typer.Option(help="none, ids or text.")] = "none",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp-endpoint",
            "--otlp-traces-endpoint",
            help="URL for OpenTelemetry's spans of requests.",
        ),
    ] = None,
) -> None:
    """Serve MODEL over HTTP, with OpenAI's routes.

    Other options are those of `LLM` (such as --max-num-seqs 64).
    """
    with errors_as_sentences():
        with extra("nv serve", "server"):
            from nv_api.server.run import run  # noqa: PLC0415  # an extra
        from nv_api.server.listening import Listening  # noqa: PLC0415
        from nv_api.server.lora_modules import lora_modules as adapters_of  # noqa: PLC0415
        from nv_api.server.options import ServeOptions, byte_size  # noqa: PLC0415

        options = ServeOptions(
            model=model,
            served_model_name=tuple(served_model_name or ()),
            lora_modules=adapters_of(lora_modules or ()),
            allow_runtime_lora_updating=allow_runtime_lora_updating,
            api_key=tuple(api_key or ()),
            allowed_origins=tuple(allowed_origins or ()),
            generation_config=generation_config,
            override_generation_config=_override(model, override_generation_config),
            chat_template=_text(chat_template) if chat_template else None,
            reasoning_parser=reasoning_parser,
            tool_call_parser=tool_call_parser,
            max_queue=max_queue,
            max_body_bytes=byte_size(max_body_bytes),
            max_n=max_n,
            max_logprobs=max_logprobs,
            max_grammar_bytes=byte_size(max_grammar_bytes),
            request_timeout=request_timeout,
            write_timeout=write_timeout,
            drain_seconds=drain_seconds,
            ping_interval=ping_interval,
            log_requests=log_requests,
            otlp_endpoint=otlp_endpoint,
        )
        listening = Listening(
            host=host,
            port=port,
            uds=uds,
            root_path=root_path,
            keep_alive=keep_alive,
            head_timeout=head_timeout,
            body_timeout=body_timeout,
            ssl_keyfile=ssl_keyfile,
            ssl_certfile=ssl_certfile,
            ssl_keyfile_password=ssl_keyfile_password,
            ssl_ca_certs=ssl_ca_certs,
        )
        code = run(model, options_of(context.args), options, listening)
    raise typer.Exit(code)


def _override(model: str, text: str) -> dict[str, Any]:
    """The object of a JSON text; beneath it, for the demo model, what its authors recommend."""
    given = json_object("override_generation_config", text)
    return {**(DEMO_CHAT if model == DEMO else {}), **given}


def _text(file: Path) -> str:
    """The contents of a template's file."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"chat_template {file} is not UTF-8: write it anew") from error


@app.command(
    "run-batch",
    cls=ServingCommand,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def run_batch(
    context: typer.Context,
    *,
    input_file: Annotated[
        Path, typer.Option("--input-file", "-i", help="Requests, in OpenAI's batch format.")
    ],
    output_file: Annotated[
        Path, typer.Option("--output-file", "-o", help="Results; those that it has are kept.")
    ],
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub name or demo.")] = DEMO,
    concurrency: Annotated[int, typer.Option(help="Most lines in flight.")] = 256,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="A name of the model; several may be given.")
    ] = None,
    lora_modules: LoRAModules = None,
    generation_config: Annotated[
        str, typer.Option(help="nv: the checkpoint's recommendation is not used.")
    ] = "auto",
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="Finds thoughts; none: off.", show_default="of the chat template"),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="Finds calls of tools; none: off.", show_default="of the chat template"),
    ] = None,
) -> None:
    """Answer the requests of a file with MODEL. Run it again after a stop: it goes on.

    Other options are those of `LLM` (such as --max-num-seqs 64).
    """
    with errors_as_sentences():
        with extra("nv run-batch", "server"):
            from nv_api.server.batch.run import BatchJob, run  # noqa: PLC0415  # an extra
        from nv_api.server.lora_modules import lora_modules as adapters_of  # noqa: PLC0415
        from nv_api.server.options import MAX_SECONDS, ServeOptions  # noqa: PLC0415

        options = ServeOptions(
            model=model,
            served_model_name=tuple(served_model_name or ()),
            lora_modules=adapters_of(lora_modules or ()),
            generation_config=generation_config,
            override_generation_config=_override(model, "{}"),
            reasoning_parser=reasoning_parser,
            tool_call_parser=tool_call_parser,
            max_queue=MAX_SEQUENCES,
            request_timeout=MAX_SECONDS,
        )
        batch = BatchJob(input_file=input_file, output_file=output_file, concurrency=concurrency)
        counts, code = run(model, options_of(context.args), options, batch)
        typer.echo(f"nv: {counts}", err=True)
    raise typer.Exit(code)


def options_of(arguments: list[str]) -> dict[str, Any]:
    """Options of `LLM` from a command line: "--max-num-seqs 64" is {"max_num_seqs": 64}.

    Raises:
        ValueError: a word that belongs to no option.
    """
    options: dict[str, Any] = {}
    words = iter(arguments)
    name = ""
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            if name == "model":
                raise ValueError(
                    "the model is given without --model, as in nv serve MODEL --port 8000"
                )
            if name.startswith("no_") and not has_value:  # vLLM's form of a flag that is off
                options[name.removeprefix("no_")], name = False, ""
                continue
            options[name] = _value(name, value) if has_value else True
            if has_value:
                name = ""
        elif name:
            options[name] = _value(name, word)
            name = ""
        else:
            raise ValueError(f"{word!r} belongs to no option: give options as --name value")
    return options


def _value(name: str, word: str) -> object:
    """A number, True, False, None or JSON as such; another word as a text, and each of TEXTS."""
    if name in TEXTS:
        return word
    if word.lower() in {"true", "false", "none"}:
        return {"true": True, "false": False, "none": None}[word.lower()]
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _answer(
    llm: "LLM",
    messages: list[dict[str, str]],
    params: "SamplingParams",
    lora: "LoRARequest | None",
) -> str | None:
    """Print an answer as it comes, up to its end or Ctrl-C, and return it.

    An answer that repeats itself is stopped and returned without the repetition, which the model
    would continue. None: the conversation is too long for the context; a sentence is printed.
    """
    answer = ""
    try:
        with closing(llm.stream_chat(messages, params, lora_request=lora)) as stream:
            for delta in stream:
                if delta.finish_reason == "error":
                    raise RuntimeError(f"the request failed on the device: {delta.stop_reason}")
                answer += delta.text
                typer.echo(delta.text, nl=False)
                if surplus := repeated_end(answer):
                    answer = answer[:-surplus]
                    typer.echo(" (stopped: the answer repeats itself)", nl=False, err=True)
                    break
    except KeyboardInterrupt:
        typer.echo(" (stopped)", nl=False, err=True)
    except ValueError as error:
        typer.echo(f"nv: {sentence(error)}", err=True)
        typer.echo(f"nv: your last line is left out; {FORGET} forgets the conversation", err=True)
        return None
    typer.echo()
    return answer


def _read_line() -> str:
    """The next line (of a pipe, the next that is not empty); "" at the end."""
    if sys.stdin is None:  # the parent process closed it
        return ""
    try:
        if sys.stdin.isatty():
            return input("> ").strip()
        return next(filter(None, map(str.strip, sys.stdin)), "")
    except (EOFError, KeyboardInterrupt):
        typer.echo()  # the shell's own prompt comes next
        return ""
