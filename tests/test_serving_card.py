"""Of benchmarks/serving_card.py: processes send the whole load; the null server keeps time."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from nv_api.bench.client import Client
from nv_api.bench.load import INFINITY, Load
from nv_api.bench.prompts import Prompt

if TYPE_CHECKING:
    from nv_api.bench.outcome import Outcome

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
STEP_SECONDS = 0.01


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_parts_of_a_load_are_the_load() -> None:
    from generators import split  # noqa: PLC0415  # found by the fixture

    load = Load(num_prompts=1001, request_rate=64.0, max_concurrency=256)
    parts = split(load, 4)
    assert sum(each.num_prompts for each in parts) == 1001
    assert sum(each.request_rate for each in parts) == 64.0
    assert sum(each.max_concurrency or 0 for each in parts) == 256
    assert len({each.seed for each in parts}) == 4
    assert len(split(Load(request_rate=4.0), 4)) == 1
    assert {each.request_rate for each in split(Load(), 4)} == {INFINITY}
    shared = Load(random_prefix_len=8, random_num_prefixes=32)
    assert sum(each.random_num_prefixes for each in split(shared, 8)) == 32
    with pytest.raises(ValueError, match="random_num_prefixes is 32"):
        split(shared, 3)


def test_the_null_server_keeps_its_steps() -> None:
    import null_server  # noqa: PLC0415  # found by the fixture

    async def measured() -> "list[Outcome]":
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: null_server.Connection(STEP_SECONDS), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        async with server, aiohttp.ClientSession() as session:
            client = Client(session, f"http://127.0.0.1:{port}", Load(ignore_eos=True))
            name = (await client.first_model()).name
            return [await client.send(Prompt([1, 2, 3], 6), name) for _ in range(2)]

    for each in asyncio.run(measured()):
        assert not each.error
        assert (each.num_prompt, each.num_output, len(each.itls)) == (3, 6, 5)
        assert each.e2el > 4.5 * STEP_SECONDS  # five steps, by two clocks
