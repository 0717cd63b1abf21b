"""The CPU time of serving, without a model: a scripted device under the real engine.

Three figures, each the CPU time of a process over one run of `--streams` requests at once, with
steps at the pace of a card (`--step-ms`), so that tokens do not merge:

- the engine alone, per step: in a process that does nothing else, with the host's options, its
  prompts, old objects kept from the garbage collector, and a prefix cache as full as the host's;
- the engine in its host, per step, requests and frames included;
- the front end, per token: detokenizing, events, HTTP, all clients reading over a socket; in user
  and in system time, for writes to sockets are much of it.

CPU time is counted and not wall time, which depends on what else the machine does.
"""

import argparse
import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import nv_api.async_llm
from nv_api.host.process import HostProcess, serve
from nv_api.host.wire import Wire
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from report import report
from workload import TINY, model_config

TESTS = Path(__file__).parents[1] / "packages" / "nv-api" / "tests"
sys.path += [str(TESTS), str(TESTS / "host")]  # the scripted device and a tokenizer

PROMPT = [5, 6, 7]
STEP_MS = "NV_STEP_MS"
PORT = "NV_PORT"
WARM_UP = 8
"""Streams before those that count."""


def device():
    """Says the alphabet, for ever."""
    from scripted_device import ScriptedDevice

    seconds = float(os.environ[STEP_MS]) / 1000
    letters = [65 + place % 20 for place in range(2048)]
    return ScriptedDevice(lambda _: letters, step_seconds=seconds, num_blocks=40_000)


class ScriptedHost(HostProcess):
    """A host process over the scripted device."""

    entry = "serving_cost:run_host"


def run_host(end: int) -> None:
    """The host's main."""
    serve(Wire(socket.socket(fileno=end)), lambda config: Engine(config, device()))
    os._exit(0)


def run_server(model: str, num_streams: int) -> None:
    """The front end's main: `nv serve` over a scripted host, whose process id it prints."""
    from nv_api.server.listening import Listening
    from nv_api.server.options import ServeOptions
    from nv_api.server.run import run

    class Announced(ScriptedHost):
        def __init__(self) -> None:
            super().__init__()
            print(self.process_id, flush=True)

    nv_api.async_llm.HostProcess = Announced
    options = ServeOptions(model=model, served_model_name=("scripted",))
    engine = {"max_num_seqs": num_streams, "max_model_len": 2048}
    run(model, engine, options, Listening(port=int(os.environ[PORT])))


class CPUTime(NamedTuple):
    """CPU seconds of a process and its threads."""

    user: float
    system: float

    def since(self, earlier: "CPUTime") -> "CPUTime":
        return CPUTime(self.user - earlier.user, self.system - earlier.system)

    @property
    def whole(self) -> float:
        return self.user + self.system


def cpu_time(process_id: int) -> CPUTime:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return CPUTime(int(fields[11]) / ticks, int(fields[12]) / ticks)


def run_seconds(process_id: int) -> float:
    """CPU seconds of a process so far, to the nanosecond; of threads that have ended, none."""
    threads = Path(f"/proc/{process_id}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


def run_alone(num_streams: int) -> None:
    """The main of the engine alone: for each prompt that it gets, the CPU time of a run."""
    config = EngineConfig(model="scripted", max_num_seqs=num_streams, max_model_len=2048)
    engine = Engine(config, device())
    gc.collect()
    gc.freeze()  # as the host
    for line in sys.stdin:
        prompt, num_tokens = json.loads(line)
        began = run_seconds(os.getpid())
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for _ in range(num_streams):
            engine.add(EngineRequest(prompt, params))
        while engine.has_unfinished:
            engine.step()
        print(run_seconds(os.getpid()) - began, flush=True)


class Alone:
    """The engine alone, in its process."""

    def __init__(self, num_streams: int) -> None:
        self._process = start_python(
            f"serving_cost.run_alone({num_streams})", stdin=subprocess.PIPE, text=True
        )

    def us_per_step(self, prompt: list[int], num_tokens: int) -> float:
        """CPU microseconds of a step."""
        ask, answer = self._process.stdin, self._process.stdout
        assert ask is not None
        assert answer is not None
        ask.write(json.dumps([prompt, num_tokens]) + "\n")
        ask.flush()
        return float(answer.readline()) / num_tokens * 1e6

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def start_python(code: str, **options: Any) -> "subprocess.Popen[Any]":
    """A Python process that runs a main of this file; its output is a pipe."""
    command = [sys.executable, "-c", f"import serving_cost; {code}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent, **options)


async def stream(port: int, num_tokens: int, route: str) -> tuple[int, int]:
    """Read one stream to its end; returns its events and bytes."""
    body = {"model": "scripted", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body |= {"prompt": PROMPT} if route == "completions" else {"messages": MESSAGES}
    content = json.dumps(body).encode()
    path = "/v1/completions" if route == "completions" else "/v1/chat/completions"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode())
    writer.write(content)
    num_events = num_bytes = 0
    while part := await reader.read(1 << 16):
        num_events += part.count(b"data: ")
        num_bytes += len(part)
    writer.close()
    return num_events, num_bytes


MESSAGES = [{"role": "user", "content": "hi"}]


async def wait_for(port: int) -> None:
    """Until the server is ready."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.2)
            continue
        writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = await reader.read(1 << 16)
        writer.close()
        if b" 200 " in head.partition(b"\r\n")[0]:
            return
        await asyncio.sleep(0.2)


async def served(
    args: argparse.Namespace, front: int, host: int, port: int, route: str
) -> dict[str, float]:
    """Figures of one run over HTTP."""
    await asyncio.gather(*(stream(port, 20, route) for _ in range(WARM_UP)))
    before, host_began = cpu_time(front), run_seconds(host)
    began = time.monotonic()
    runs = [stream(port, args.tokens, route) for _ in range(args.streams)]
    read = await asyncio.gather(*runs)
    seconds = time.monotonic() - began
    of_front, of_host = cpu_time(front).since(before), run_seconds(host) - host_began
    num_tokens = args.streams * args.tokens
    return {
        "front_end_us_per_token": round(of_front.whole / num_tokens * 1e6, 2),
        "front_end_user_us_per_token": round(of_front.user / num_tokens * 1e6, 2),
        "front_end_system_us_per_token": round(of_front.system / num_tokens * 1e6, 2),
        "host_us_per_step": round(of_host / args.tokens * 1e6, 1),
        "tokens_per_event": round(num_tokens / sum(events for events, _ in read), 2),
        "bytes_per_token": round(sum(size for _, size in read) / num_tokens),
        "wall_s": round(seconds, 2),
    }


def prompt_of(port: int, route: str) -> list[int]:
    """The token ids that the engine gets of a route."""
    if route == "completions":
        return PROMPT
    body = json.dumps({"messages": MESSAGES}).encode()
    headers = {"content-type": "application/json"}
    asked = Request(f"http://127.0.0.1:{port}/tokenize", body, headers)
    with urlopen(asked) as answer:
        found: list[int] = json.load(answer)["tokens"]
    return found


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_folder(folder: Path) -> None:
    """A config and a tokenizer, without weights."""
    from conftest import byte_level_tokenizer

    byte_level_tokenizer().save_pretrained(folder)
    sizes = {"vocab_size": 320, "eos_token_id": 256, "max_position_embeddings": 4096}
    config = model_config("qwen3-0.6b", **TINY, **sizes)
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="per stream")
    parser.add_argument("--step-ms", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--save")
    args = parser.parse_args()
    os.environ[STEP_MS] = str(args.step_ms)
    os.environ[PORT] = str(port := free_port())
    figures: dict[str, object] = {"streams": args.streams, "tokens": args.tokens}
    figures["step_ms"] = args.step_ms
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        server = start_python(f"serving_cost.run_server({folder!r}, {args.streams})")
        alone = Alone(args.streams)
        try:
            assert server.stdout is not None
            host = int(server.stdout.readline())
            asyncio.run(wait_for(port))
            rounds: dict[str, list[dict[str, float]]] = {"completions": [], "chat": []}
            for _ in range(args.rounds):  # in turn: what else runs weighs on all alike
                for route, found in rounds.items():
                    prompt = prompt_of(port, route)
                    alone_us = round(alone.us_per_step(prompt, args.tokens), 1)
                    run = asyncio.run(served(args, server.pid, host, port, route))
                    found.append({"engine_alone_us_per_step": alone_us, **run})
        finally:
            alone.end()
            server.terminate()
            server.wait()
    figures["load_average"] = round(os.getloadavg()[0], 1)
    for route, found in rounds.items():
        figures[route] = {name: min(each[name] for each in found) for name in found[0]}
    report("serving_cost", figures, args.save)


if __name__ == "__main__":
    main()
