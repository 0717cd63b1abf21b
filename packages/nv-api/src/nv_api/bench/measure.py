"""Measure: one benchmark, from the server's first answer to the figures.

Owns the order: the model's name, the prompts, a first request, warm-ups, the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped]

from nv_api.bench.client import Client, ServedModel, open_session
from nv_api.bench.load import Load
from nv_api.bench.outcome import Outcome
from nv_api.bench.pace import Run, run
from nv_api.bench.prompts import Prompt, file_prompts, random_prompts, read_tokenizer


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server that is measured."""

    base_url: str
    endpoint: str | None = None
    """The route; None: that of the load's backend."""
    model: str | None = None
    """The model's name; None: the server's first."""
    tokenizer: str | None = None
    """Where random prompts get their token ids; None: from the model."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class Measured(NamedTuple):
    """A run, and what it ran."""

    run: Run
    model: ServedModel


async def measure(target: Target, load: Load, *, is_quiet: bool) -> Measured:
    """Send a load to a server.

    Raises:
        ValueError, OSError: the server, the model's tokenizer or the file is not there.
        RuntimeError: the first request fails.
    """
    async with open_session(load, target.headers) as session:
        client = Client(session, target.base_url, load, target.endpoint)
        model = await _model(client, target)
        prompts = _prompts(load, target.tokenizer or model.root)

        async def send(prompt: Prompt) -> Outcome:
            return await client.send(prompt, model.name)

        first = await send(prompts[0])
        if first.error:
            raise RuntimeError(f"the first request failed: {first.error}")
        if load.num_warmups:
            # one prompt, as vLLM: the others must not find their prefixes in the cache
            warmups = [prompts[0]] * load.num_warmups
            await run(warmups, replace(load, num_prompts=load.num_warmups), send, lambda: None)
        with tqdm(total=len(prompts), disable=is_quiet) as bar:
            return Measured(await run(prompts, load, send, bar.update), model)


async def _model(client: Client, target: Target) -> ServedModel:
    """The model that was named, or the server's first."""
    if target.model is None:
        return await client.first_model()
    return ServedModel(target.model, target.model)


def _prompts(load: Load, tokenizer: str) -> list[Prompt]:
    if load.dataset_path is not None:
        return file_prompts(load.dataset_path, load)
    return random_prompts(load, read_tokenizer(tokenizer))
