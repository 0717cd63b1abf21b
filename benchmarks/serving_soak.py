"""A server under load for minutes, without a model: what is left over at the end.

`nv serve` runs over a scripted device. `--streams` clients stream at any time: a third leave at a
random moment, the others must get the whole text. `--deaf` more never read. A process of its own
asks for /health. At the end the load stops, and the script checks:

- every client that read to the end has its whole text, and none was refused;
- nothing runs or waits, and all blocks of the cache are free;
- tasks, file descriptors and threads are as many as before the load;
- memory is flat: within 10 % of what it was after the warm-up (a minute, or a third of the run).

What does not hold is in `problems`, and the exit code is then 1. Times of /health are reported and
not checked, for they depend on what else the machine does: the share of the run in which the event
loop had to wait for a CPU stands beside them.
"""

import argparse
import asyncio
import json
import os
import random
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import IO, Any

import uvloop
from report import report
from serving_cost import PORT, free_port, make_folder, wait_for

ROOT = Path(__file__).parent
BLOCKS = 40_000
MAX_TOKENS = 200
DEAF_TOKENS = 1900
WRITE_TIMEOUT = 5.0
SEND_BUFFER = 1 << 12
"""Of the server's sockets, so that a client that does not read is soon noticed."""
SETTLE_SECONDS = 30.0
HEALTH_PAUSE = 0.05
TEXT = re.compile(rb'"text":"([^"]*)"')
LETTERS = "".join(chr(98 + place % 20) for place in range(MAX_TOKENS)).encode()


def run_server(model: str, num_sequences: int) -> None:
    """The server's main: prints its host's process id, and then its tasks for each line it gets."""
    import nv_api.async_llm
    from nv_api.server import run as module
    from nv_api.server.options import ServeOptions
    from scripted_host import ScriptedHost

    class Announced(ScriptedHost):
        def __init__(self) -> None:
            super().__init__()
            print(self.process_id, flush=True)

    class Small(module.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for each in self.servers[0].sockets:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            loop = asyncio.get_running_loop()
            loop.add_reader(sys.stdin.fileno(), count_tasks)

    def count_tasks() -> None:
        if sys.stdin.readline():
            print(len(asyncio.all_tasks()), flush=True)

    nv_api.async_llm.HostProcess = Announced
    module.Server = Small
    options = ServeOptions(
        model=model, served_model_name=("scripted",), max_queue=8192, write_timeout=WRITE_TIMEOUT
    )
    engine = {"max_num_seqs": num_sequences, "max_model_len": 2048}
    module.run(model, engine, options, module.Listening(port=int(os.environ[PORT])))


def ask_for_health(port: int) -> None:
    """The main of the process that asks, until a signal; prints its times, in milliseconds."""
    times: list[float] = []
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    end = socket.create_connection(("127.0.0.1", port))
    while not ended:
        began = time.monotonic()
        end.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        head = end.recv(1 << 16)
        assert head.startswith(b"HTTP/1.1 200 "), head
        times.append(round((time.monotonic() - began) * 1e3, 2))
        time.sleep(HEALTH_PAUSE)
    print(json.dumps(times), flush=True)


def request_bytes(num_tokens: int, **more: object) -> bytes:
    """A streamed request."""
    body = {"prompt": [5, 6, 7], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body |= more
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


class Client(asyncio.Protocol):
    """One request: everything that came for it."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.parts: list[bytes] = []
        self.gone = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(request_bytes(self.num_tokens))

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    @property
    def is_whole(self) -> bool:
        """Whether the answer is what the script says."""
        received = b"".join(self.parts)
        text = b"".join(TEXT.findall(received))
        return text == LETTERS[: self.num_tokens] and b"data: [DONE]" in received


class Load:
    """All clients; `num_*` count what became of them."""

    def __init__(self, port: int, step_seconds: float) -> None:
        self.port = port
        self.step_seconds = step_seconds
        self.num_whole = self.num_dropped = self.num_deaf_ended = 0
        self.broken: list[str] = []
        self.is_over = False

    async def stream(self, seed: int) -> None:
        """One request after the other."""
        rng = random.Random(seed)
        loop = asyncio.get_running_loop()
        while not self.is_over:
            num_tokens = rng.randint(20, MAX_TOKENS)
            make = partial(Client, num_tokens)
            transport, client = await loop.create_connection(make, "127.0.0.1", self.port)
            if rng.random() < 1 / 3:
                await asyncio.sleep(rng.uniform(0, num_tokens * self.step_seconds))
                self.num_dropped += 1
                (transport.abort if rng.random() < 0.5 else transport.close)()
                await client.gone
                continue
            await client.gone
            if client.is_whole:
                self.num_whole += 1
            else:
                self.broken.append(b"".join(client.parts)[-300:].decode(errors="replace"))

    async def deaf(self) -> None:
        """Clients that never read, the next once the server has ended one."""
        while not self.is_over:
            end = socket.socket()
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            end.connect(("127.0.0.1", self.port))
            usage = {"include_usage": True, "continuous_usage_stats": True}  # long events
            end.sendall(request_bytes(DEAF_TOKENS, stream_options=usage))
            poll = select.poll()
            poll.register(end, select.POLLERR | select.POLLHUP | select.POLLRDHUP)
            while not (is_ended := bool(poll.poll(0))) and not self.is_over:
                await asyncio.sleep(0.2)
            self.num_deaf_ended += is_ended
            end.close()


def shares(process_id: int) -> tuple[float, float]:
    """Seconds that a process's first thread ran, and that it waited for a CPU."""
    ran, waited = Path(f"/proc/{process_id}/schedstat").read_text().split()[:2]
    return int(ran) / 1e9, int(waited) / 1e9


def left_open(process_id: int) -> dict[str, int]:
    """File descriptors and threads of a process, and its memory in KiB."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return {
        "files": len(os.listdir(f"/proc/{process_id}/fd")),
        "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),
        "kib": int(re.search(r"VmRSS:\s+(\d+)", status)[1]),
    }


class Watched:
    """The server's two processes."""

    def __init__(self, server: "subprocess.Popen[str]", host: int) -> None:
        self._server = server
        self._ids = {"front_end": server.pid, "host": host}

    def left_open(self) -> dict[str, dict[str, int]]:
        found = {name: left_open(process_id) for name, process_id in self._ids.items()}
        found["front_end"]["tasks"] = self._num_tasks()
        return found

    def loop_seconds(self) -> tuple[float, float]:
        """Of the front end's event loop: as `shares`."""
        return shares(self._server.pid)

    def _num_tasks(self) -> int:
        ask, answer = self._server.stdin, self._server.stdout
        assert ask is not None
        assert answer is not None
        ask.write("\n")
        ask.flush()
        return int(answer.readline())


async def fetched(port: int, path: str) -> str:
    """The body of a page."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    body = (await reader.read(-1)).decode().partition("\r\n\r\n")[2]
    writer.close()
    await writer.wait_closed()
    return body


async def gauges(port: int) -> dict[str, float]:
    """The gauges that are 0 when nothing is in flight."""
    page = await fetched(port, "/metrics")
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = {n: float(re.search(rf"^vllm:{n}\{{.*\}} (.*)$", page, re.M)[1]) for n in names}
    return {**found, "load": json.loads(await fetched(port, "/load"))["server_load"]}


async def soak(args: argparse.Namespace, port: int, watched: Watched) -> dict[str, Any]:
    """Run the load; returns the figures and the problems."""
    load = Load(port, args.step_ms / 1e3)
    # before counting what is open: threads of pools and the like are made by the first requests
    short = [asyncio.create_task(load.stream(-1 - n)) for n in range(min(50, args.streams))]
    await asyncio.sleep(3)
    load.is_over = True
    await asyncio.gather(*short)
    await settled(port)
    before = watched.left_open()
    load.is_over = False
    began, shares_before = time.monotonic(), watched.loop_seconds()
    tasks = [asyncio.create_task(load.stream(n)) for n in range(args.streams)]
    tasks += [asyncio.create_task(load.deaf()) for _ in range(args.deaf)]
    seconds = args.minutes * 60
    await asyncio.sleep(min(60.0, seconds / 3))
    warm = watched.left_open()
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    loaded, shares_after = watched.left_open(), watched.loop_seconds()
    ran, waited = (b - a for a, b in zip(shares_before, shares_after, strict=True))
    load.is_over = True
    await asyncio.gather(*tasks)
    still = await settled(port)
    after = watched.left_open()
    problems = [f"{name} is {value}, not 0" for name, value in still.items() if value]
    if args.deaf and not load.num_deaf_ended:
        problems.append("the server ended no client that does not read: run it for longer")
    problems += [f"a disturbed client got: {text}" for text in load.broken[:3]]
    for name, own in after.items():
        for what in own.keys() - {"kib"}:
            if own[what] > before[name][what]:
                problems.append(f"{name}: {what} were {before[name][what]}, are {own[what]}")
        if loaded[name]["kib"] > warm[name]["kib"] * 1.1:
            problems.append(f"{name}: KiB were {warm[name]['kib']}, are {loaded[name]['kib']}")
    return {
        "whole": load.num_whole,
        "dropped": load.num_dropped,
        "disturbed": len(load.broken),
        "deaf_ended": load.num_deaf_ended,
        "loop_ran_share": round(ran / seconds, 3),
        "loop_waited_for_a_cpu_share": round(waited / seconds, 3),
        "before": before,
        "after_the_warm_up": warm,
        "at_the_end": loaded,
        "after": after,
        "problems": problems,
    }


async def settled(port: int) -> dict[str, float]:
    """Wait until nothing is in flight, for a while; returns the gauges then."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while any((found := await gauges(port)).values()) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    await asyncio.sleep(1)  # connections that were closed are gone
    return found


def child(code: str, **pipes: int) -> "subprocess.Popen[str]":
    """A Python process that runs a main of this file."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import serving_soak; {code}"], cwd=ROOT, text=True, **pipes
    )


def read_line(pipe: IO[str] | None) -> str:
    """The next line of a process."""
    assert pipe is not None
    return pipe.readline()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--deaf", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--save")
    args = parser.parse_args()
    os.environ[PORT] = str(port := free_port())
    os.environ["NV_SCRIPT"] = json.dumps(
        {"step_seconds": args.step_ms / 1e3, "num_tokens": 2000, "num_blocks": BLOCKS}
    )
    num_sequences = args.streams + args.deaf + 100
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        server = child(
            f"serving_soak.run_server({folder!r}, {num_sequences})",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            host = int(read_line(server.stdout))
            asyncio.run(wait_for(port))
            asking = child(f"serving_soak.ask_for_health({port})", stdout=subprocess.PIPE)
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    figures = runner.run(soak(args, port, Watched(server, host)))
            finally:
                asking.terminate()
                times = json.loads(read_line(asking.stdout) or "[]")
                asking.wait()
        finally:
            server.terminate()
            exit_code = server.wait()
    if exit_code:
        figures["problems"].append(f"the server ended with {exit_code}")
    if len(times) > 1:
        cut = statistics.quantiles(times, n=100)
        figures["health_ms"] = {"p50": cut[49], "p99": round(cut[98], 2), "most": max(times)}
    else:
        figures["problems"].append("/health did not answer")
    load = {name: value for name, value in vars(args).items() if name != "save"}
    report("serving_soak", {**load, **figures}, args.save)
    if figures["problems"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
