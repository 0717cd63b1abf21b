"""`nv bench`: measure a server from the outside.

Owns the terminal: options, the table, the file. Everything else is imported when it runs, so that
`nv --help` is fast.
"""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from nv_api.sentences import errors_as_sentences, extra, json_object

app = typer.Typer(help="Measure a server.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure a server."""


@app.command()
def serve(
    *,
    base_url: Annotated[
        str | None, typer.Option(help="Of the server.", show_default="of --host and --port")
    ] = None,
    host: Annotated[str, typer.Option(help="Of the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the server.")] = 8000,
    backend: Annotated[
        str, typer.Option(help="openai: completions; openai-chat: chat completions.")
    ] = "openai",
    endpoint: Annotated[
        str | None, typer.Option(help="Route.", show_default="of the backend")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name in requests.", show_default="the server's first")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder or hub name, for random prompts.", show_default="the model"),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Of the server.", envvar=["NV_API_KEY", "OPENAI_API_KEY"])
    ] = None,
    dataset_name: Annotated[str, typer.Option(help="random, or custom: a file.")] = "random",
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            help="JSONL with `prompt` or `messages`, and `output_tokens`.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests to send.")] = 1000,
    random_input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths vary by this share, both ways.")
    ] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Shared tokens before a prompt.")] = 0,
    random_num_prefixes: Annotated[int, typer.Option(help="Different shared beginnings.")] = 1,
    output_len: Annotated[
        int | None, typer.Option(help="Most tokens of an answer, with a file.", show_default="256")
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second; inf: all at once.")
    ] = float("inf"),
    burstiness: Annotated[
        float, typer.Option(help="1: Poisson; below 1: in bursts; above: more evenly.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Most requests in flight.", show_default="no limit")
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests that are not measured.")] = 0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers have their full length.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    extra_body: Annotated[str, typer.Option(help="JSON: more fields of each request.")] = "{}",
    header: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; several.")] = None,
    request_timeout: Annotated[float, typer.Option(help="Seconds of a request.")] = 3600.0,
    percentile_metrics: Annotated[str, typer.Option(help="Times to show.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="As 50,99.")] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Bounds in ms, as 'ttft:200 tpot:20'; those within them are counted."),
    ] = None,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write a JSON file.")] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With every request.")
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Of the file.")] = Path(),
    result_filename: Annotated[
        str | None, typer.Option(help="Its name.", show_default="rate, model and time")
    ] = None,
    disable_tqdm: Annotated[
        bool, typer.Option("--disable-tqdm", help="Without a progress bar.")
    ] = False,
) -> None:
    """Send requests to a server with OpenAI's routes, and print its speed."""
    with errors_as_sentences():
        with extra("nv bench serve", "bench"):
            from nv_api.bench.figures import figures  # noqa: PLC0415  # imports torch: seconds
            from nv_api.bench.load import (  # noqa: PLC0415
                Load,
                milliseconds_by_metric,
                percentiles_of,
            )
            from nv_api.bench.measure import Target, measure  # noqa: PLC0415  # an extra
            from nv_api.bench.report import Report  # noqa: PLC0415

        load = Load(
            backend=backend,
            dataset_path=_file(dataset_name, dataset_path),
            num_prompts=num_prompts,
            random_input_len=random_input_len,
            random_output_len=random_output_len,
            random_range_ratio=random_range_ratio,
            random_prefix_len=random_prefix_len,
            random_num_prefixes=random_num_prefixes,
            output_len=output_len,
            request_rate=request_rate,
            burstiness=burstiness,
            max_concurrency=max_concurrency,
            num_warmups=num_warmups,
            seed=seed,
            ignore_eos=ignore_eos,
            temperature=temperature,
            extra_body=json_object("extra_body", extra_body),
            request_timeout=request_timeout,
        )
        report = Report(
            load=load,
            metrics=tuple(percentile_metrics.split(",")),
            percentiles=percentiles_of(metric_percentiles),
            bounds=milliseconds_by_metric(goodput or []),
        )
        target = Target(
            base_url=base_url or f"http://{host}:{port}",
            endpoint=endpoint,
            model=model,
            tokenizer=tokenizer,
            headers=_headers(header or [], api_key),
        )
        measured = asyncio.run(measure(target, load, is_quiet=disable_tqdm))
        found = figures(measured.run, report.percentiles, report.bounds)
        typer.echo(report.table(found))
        for warning in report.warnings(measured):
            typer.echo(f"nv: {warning}", err=True)
        if save_result or save_detailed or result_filename is not None:
            path = result_dir / (result_filename or report.file_name(measured))
            fields = report.fields(measured, target, found, is_detailed=save_detailed)
            path.write_text(json.dumps(fields) + "\n", encoding="utf-8")
            typer.echo(f"nv: the result is in {path}", err=True)
    if not measured.run.whole:
        raise typer.Exit(1)


def _file(dataset_name: str, path: Path | None) -> Path | None:
    """The file of prompts; None: they are random."""
    if dataset_name not in ("random", "custom"):
        raise ValueError(f"dataset_name is {dataset_name!r}: it must be random or custom")
    if (dataset_name == "custom") != (path is not None):
        raise ValueError(
            "--dataset-name custom and --dataset-path FILE belong together: give both, or neither "
            "for random prompts"
        )
    return path


def _headers(named: list[str], api_key: str | None) -> dict[str, str]:
    """The headers of every request; an error does not show a value, which may be a secret."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    for each in named:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise ValueError("header must be NAME=VALUE, such as x-tenant=blue")
        headers[name] = value
    return headers
