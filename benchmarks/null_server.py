"""A server without a model: every request gets a token per step, at once and in time.

What a client measures of it beyond `step_seconds` per token and nothing before the first is the
client's own. Several processes share the port.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
from typing import Any

import uvloop

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
MODELS = json.dumps({"data": [{"id": "null", "root": "null"}]}).encode()
TOKEN = {
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1700000000,
    "model": "null",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
}


def chunk(data: bytes) -> bytes:
    """One event as a chunk of HTTP."""
    event = b"data: " + data + b"\n\n"
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


EVENT = chunk(json.dumps(TOKEN).encode())


def ending(num_prompt: int, num_tokens: int) -> bytes:
    """The usage, and the end."""
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    last = json.dumps(TOKEN | {"choices": [], "usage": usage}).encode()
    return chunk(last) + chunk(b"[DONE]") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """A client's connection: one request after the other."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._held = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer once the request is whole."""
        self._held += data
        head, end, body = self._held.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self._held = b""
            length = f"HTTP/1.1 200 OK\r\ncontent-length: {len(MODELS)}\r\n\r\n".encode()
            self._transport.write(length + MODELS)
            return
        length_of = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(length_of[b"content-length"]):
            return
        self._held = b""
        fields = json.loads(body)
        self._stream(len(fields["prompt"]), fields["max_tokens"])

    def _stream(self, num_prompt: int, num_tokens: int) -> None:
        """The first token now, each other at its time."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._transport.write(HEAD + EVENT)

        def token(place: int) -> None:
            if self._transport.is_closing():
                return
            if place == num_tokens:
                self._transport.write(ending(num_prompt, num_tokens))
                return
            self._transport.write(EVENT)
            due(place + 1)

        def due(place: int) -> None:
            step = min(place, num_tokens - 1)
            loop.call_at(began + step * self._step_seconds, token, place)

        due(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--step-seconds", type=float, default=0.004)
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.step_seconds))


async def serve(port: int, step_seconds: float) -> None:
    """Listen for ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(step_seconds), "127.0.0.1", port, reuse_port=True, backlog=2048
    )
    await server.serve_forever()


class NullServer:
    """Some processes that share a free port."""

    def __init__(self, num: int, step_seconds: float) -> None:
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))  # it does not listen: the port stays ours
        self.port = int(self._reserved.getsockname()[1])
        words = [sys.executable, __file__, "--port", str(self.port)]
        words += ["--step-seconds", str(step_seconds)]
        self._processes = [subprocess.Popen(words) for _ in range(num)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
            process.wait()
        self._reserved.close()


if __name__ == "__main__":
    main()
