"""Streams beside long prompts, slow schemas and deaf clients, over the real front end.

The host is a process over a scripted device. Clients are tasks of the test's thread.

What is asserted cannot depend on other processes of the machine: CPU time of single callbacks and
turns (with a margin over the goals, for a busy machine has slow caches), numbers of tokens, and
states. Wall times are in the report of `NV_REPORT=1 pytest -s`.
"""

import asyncio
import gc
import json
import os
import select
import socket
import threading
import time

import httpx
import nv_api.async_llm
import pytest
from loop_meter import LoopMeter
from nv_api import AsyncLLM
from running_server import RunningServer
from scripted_host import VARIABLE, ScriptedHost

pytestmark = pytest.mark.slow

MOST_MS = 50.0
"""CPU time of a callback or a turn of the host; the goal is 5 on a quiet machine."""
NUM_STREAMS = 32
LONG = 100_000


def report(name, **figures):
    if os.environ.get("NV_REPORT"):
        print(f"\n{name}: {json.dumps(figures)}")


@pytest.fixture
def start(monkeypatch, folder):
    """Start a server; `script` is the host's."""
    servers = []

    def make(script, llm_options=None, **options):
        monkeypatch.setenv(VARIABLE, json.dumps(script))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nv_api.async_llm, "HostProcess", ScriptedHost)
            server = RunningServer(lambda: AsyncLLM(str(folder), **(llm_options or {})), **options)
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


class Reader:
    """A client that reads a stream: its text, and when each part came."""

    def __init__(self):
        self.received = b""
        self.times = []

    @property
    def num_events(self):
        return self.received.count(b"data: ")

    @property
    def gap(self):
        """The longest wait for a part, in milliseconds."""
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False)) * 1e3

    async def read(self, server, **body):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_bytes({"stream": True, **body}))
        try:
            while part := await reader.read(1 << 16):
                self.received += part
                self.times.append(time.monotonic())
        finally:
            writer.close()
            await writer.wait_closed()


def request_bytes(body):
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


async def health(server, times):
    """Ask for /health all the time."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        while True:
            began = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            times.append(round((time.monotonic() - began) * 1e3, 1))
            await asyncio.sleep(0.01)


async def beside(server, readers, body, work):
    """Run streams and ask for /health; once all streams have begun, do some work and end them."""
    times = []
    asking = asyncio.create_task(health(server, times))
    reading = [asyncio.create_task(each.read(server, **body)) for each in readers]
    while not all(reader.num_events for reader in readers):
        await asyncio.sleep(0.01)
    try:
        return await work(), times
    finally:
        for task in (asking, *reading):
            task.cancel()
        await asyncio.gather(asking, *reading, return_exceptions=True)


async def post(server, **body):
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        return await client.post("/v1/completions", json=body)


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_s27_a_long_prompt_beside_32_streams(start, monkeypatch, tmp_path, kind):
    script = {"step_seconds": 0.005, "num_tokens": 100_000, "max_model_len": 200_000}
    script |= {"num_blocks": 30_000, "costs": str(tmp_path / "costs.json")}
    server = start(script, {"max_model_len": None, "max_num_batched_tokens": 16384})
    prompts = {"text": "a wörld " * (LONG // 8), "ids": [n % 250 for n in range(LONG)]}
    readers = [Reader() for _ in range(NUM_STREAMS)]
    body = {"prompt": "ab", "max_tokens": 50_000}
    meter = LoopMeter()

    async def work():
        before = [reader.num_events for reader in readers]
        began = time.monotonic()
        for _ in range(3):  # the second one is cached
            answer = await post(server, prompt=prompts[kind], max_tokens=2)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens"] >= LONG
        seconds = time.monotonic() - began
        after = [reader.num_events for reader in readers]
        assert all(b > a for a, b in zip(before, after, strict=True)), "every stream goes on"
        return seconds

    with meter.at_work(monkeypatch, server.loop, server.thread_id):
        seconds, times = asyncio.run(beside(server, readers, body, work))
    server.until(server.is_idle)
    server.close()
    turns = json.loads((tmp_path / "costs.json").read_text())
    report(
        f"S27 {kind}",
        callbacks=sorted(meter.callbacks)[-3:],
        turns_ms=turns,
        lag_wall_and_own_ms=meter.latest,
        health_ms=max(times),
        gap_ms=round(max(reader.gap for reader in readers), 1),
        seconds=round(seconds, 2),
    )
    assert meter.dearest[0] < MOST_MS, meter.dearest
    assert max(turns) < MOST_MS, turns


NUMBERS = [199999, 299993, 399989, 499979]
"""A schema of the multiples of one of them takes seconds to compile."""


def test_s11_slow_schemas_beside_32_streams(start, monkeypatch, tmp_path):
    script = {"step_seconds": 0.01, "num_tokens": 100_000, "max_model_len": 200_000}
    script |= {"num_blocks": 30_000, "costs": str(tmp_path / "costs.json")}
    server = start(script, {"max_model_len": None})
    readers = [Reader() for _ in range(NUM_STREAMS)]
    body = {"prompt": "ab", "max_tokens": 50_000}
    meter = LoopMeter()

    async def work():
        before = [reader.num_events for reader in readers]
        began = time.monotonic()
        forms = [{"json": {"type": "integer", "multipleOf": number}} for number in NUMBERS]
        answers = await asyncio.gather(
            *(post(server, prompt="ab", structured_outputs=form) for form in forms)
        )
        after = [reader.num_events for reader in readers]
        seconds = time.monotonic() - began
        for answer in answers:  # refused, or the script's letters do not fit
            assert answer.status_code in (400, 500)
            assert "structured_outputs" in answer.json()["error"]["message"]
        return seconds, min(b - a for a, b in zip(before, after, strict=True))

    with meter.at_work(monkeypatch, server.loop, server.thread_id):
        (seconds, fewest), times = asyncio.run(beside(server, readers, body, work))
    server.until(server.is_idle)
    server.close()
    turns = json.loads((tmp_path / "costs.json").read_text())
    report(
        "S11",
        callbacks=sorted(meter.callbacks)[-3:],
        turns_ms=turns,
        lag_wall_and_own_ms=meter.latest,
        health_ms=max(times),
        gap_ms=round(max(reader.gap for reader in readers), 1),
        seconds=round(seconds, 2),
        events=fewest,
    )
    assert seconds > 1, "the schemas are slow"
    assert fewest > 5 * seconds, "the host steps meanwhile: 100 times per second if it is alone"
    assert meter.dearest[0] < MOST_MS, meter.dearest
    assert max(turns) < MOST_MS, turns


MANY_MS = 20.0
"""CPU time of a callback beside many prompts; the goal is 5. With all in one callback it is 40."""


PROMPTS = {
    "texts": [f"hello world {number}" for number in range(1000)],
    "ids": [[place % 250 for place in range(number, number + 200)] for number in range(1000)],
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_1000_prompts_of_one_request_leave_the_loop_free(start, monkeypatch, kind):
    server = start({"num_tokens": 50, "num_blocks": 30_000})
    body = {"prompt": PROMPTS[kind], "max_tokens": 2}
    meter = LoopMeter()
    gc.collect()
    gc.disable()  # its pauses are of the test's own objects
    try:
        with meter.at_work(monkeypatch, server.loop, server.thread_id):
            answer = asyncio.run(post(server, **body))
    finally:
        gc.enable()
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(1000))
    assert {choice["text"] for choice in choices} == {"bc"}
    assert meter.dearest[0] < MANY_MS, meter.dearest
    report("1,000 prompts", callbacks=sorted(meter.callbacks)[-3:], lag_ms=meter.latest)


NUM_DEAF, NUM_READING = 50, 200


def test_s28_50_clients_that_never_read_and_200_that_do(start, capfd):
    # However slow the machine, and so however many tokens are in one event, more than the buffers
    # take: a deaf client's answer ends by the write timeout alone.
    script = {"step_seconds": 0.002, "num_tokens": 100_000, "max_model_len": 200_000}
    script |= {"num_blocks": 400_000}
    server = start(script, {"max_model_len": None}, write_timeout=2.0)
    server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    usage = {"include_usage": True, "continuous_usage_stats": True}  # long events
    deaf = []
    for _ in range(NUM_DEAF):
        end = socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        end.connect(("127.0.0.1", server.port))
        body = {"prompt": "ab", "max_tokens": 90_000, "stream": True, "stream_options": usage}
        end.sendall(request_bytes({**body, "return_token_ids": True}))
        deaf.append(end)
    server.until(lambda: server.llm.num_unfinished == NUM_DEAF)

    async def main():
        times, largest = [], []
        readers = [Reader() for _ in range(NUM_READING)]
        asking = asyncio.create_task(health(server, times))
        watching = asyncio.create_task(watch(server, largest))
        body = {"prompt": "ab", "max_tokens": 100}
        await asyncio.gather(*(reader.read(server, **body) for reader in readers))
        await asyncio.to_thread(server.until, lambda: server.llm.num_unfinished == 0, 60)
        for task in asking, watching:
            task.cancel()
        await asyncio.gather(asking, watching, return_exceptions=True)
        return readers, times, max(largest)

    readers, times, largest = asyncio.run(main())
    letters = "".join(chr(65 + 33 + place % 20) for place in range(100))
    for reader in readers:
        events = reader.received.decode().partition("\r\n\r\n")[2]
        assert texts_of(events) == letters
    server.until(server.is_idle)
    counted = server.client.get("/metrics").text
    for reason, number in ("length", NUM_READING), ("abort", NUM_DEAF):
        line = f'finished_reason="{reason}",model_name="m/tiny"}} {number}.0'
        assert line in counted, reason
    server.until(lambda: len(server.server.server_state.connections) <= 1)
    for end in deaf:
        poll = select.poll()
        poll.register(end, select.POLLERR)
        assert poll.poll(0), "the system keeps nothing for a deaf client: it gets a reset"
        end.close()
    assert "ERROR" not in capfd.readouterr().err, (
        "a client that does not read is not an error of the server"
    )
    assert largest < 1 << 18, "what a deaf client has not read is bounded"
    report(
        "S28",
        health_ms=max(times),
        gap_ms=round(max(reader.gap for reader in readers), 1),
        largest_buffer=largest,
    )


def texts_of(events):
    """The joined text of a stream of one completion."""
    lines = [line.removeprefix("data: ") for line in events.split("\n") if "data: {" in line]
    return "".join(c["text"] for line in lines for c in json.loads(line)["choices"])


async def watch(server, largest):
    """The largest buffer of a connection."""
    while True:
        connections = [*server.server.server_state.connections]
        largest.append(max((c.transport.get_write_buffer_size() for c in connections), default=0))
        await asyncio.sleep(0.05)


NUM_COMING = 64


def test_many_connections_are_accepted_in_a_few_turns_of_the_loop(front_end):
    """A turn is long beside a thousand streams: uvloop itself accepts one connection in each."""
    uvloop = pytest.importorskip("uvloop")
    server = RunningServer(front_end, uvloop.new_event_loop)
    connections = server.server.server_state.connections
    is_held, may_go, is_done = threading.Event(), threading.Event(), threading.Event()
    turns = []

    def hold():
        is_held.set()
        may_go.wait(60)
        server.loop.call_soon(turn)

    def turn():
        turns.append(len(connections))
        if turns[-1] >= NUM_COMING:
            is_done.set()
        else:
            server.loop.call_soon(turn)

    server.loop.call_soon_threadsafe(hold)
    assert is_held.wait(60)
    ends = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(NUM_COMING)]
    may_go.set()
    assert is_done.wait(60)
    assert len(turns) < NUM_COMING / 2
    for end in ends:
        end.close()
    server.close()
