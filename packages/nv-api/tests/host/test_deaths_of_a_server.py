"""`nv serve` in a process, killed in its two halves."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from running_server import Server  # noqa: F401  # skips without the server's packages
from scripted_host import VARIABLE

SCRIPT = {"step_seconds": 0.02, "num_tokens": 2000}
NUM_STREAMS = 3


class Command:
    """A running `nv serve`; `host` is its host's process id."""

    def __init__(self, folder):
        here = Path(__file__).parent
        self.lines, self.is_ready = [], threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, str(here / "scripted_serve.py"), "serve", str(folder), "--port", "0"],
            env={**os.environ, VARIABLE: json.dumps(SCRIPT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        assert self.is_ready.wait(120)
        text = "".join(self.lines)
        assert "ready: " in text, text
        self.host = int(re.search(r"host (\d+)", text)[1])
        self.port = int(re.search(r"listening on http://[\d.]+:(\d+);", text)[1])

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if "ready: " in line:
                self.is_ready.set()
        self.is_ready.set()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.reader.join(10)
        self.process.stderr.close()

    def stream(self):
        """A stream whose first event has come."""
        content = json.dumps({"prompt": "ab", "max_tokens": 2000, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        end = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        end.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        received = b""
        while b"data: " not in received:
            received += end.recv(1 << 16)
        return end


@pytest.fixture
def command(folder):
    command = Command(folder)
    yield command
    command.close()


def is_gone(process_id):
    try:
        status = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return status == "Z"


@pytest.mark.slow
def test_s05_a_killed_host_ends_streams_with_an_error_and_the_command_with_a_code(command):
    streams = [command.stream() for _ in range(NUM_STREAMS)]
    os.kill(command.host, signal.SIGKILL)
    for end in streams:
        received = b""
        while b"data: [DONE]" not in received:
            part = end.recv(1 << 16)
            assert part, received
            received += part
        end.close()
        *_, error, done = re.findall(rb"data: (.*)\n", received)
        assert done == b"[DONE]"
        error = json.loads(error)["error"]
        assert "SIGKILL" in error["message"]
        assert error["type"] == "unavailable"
    url = f"http://127.0.0.1:{command.port}"
    for path in "/health", "/ready":
        assert httpx.get(url + path, timeout=60).status_code == 503
    refused = httpx.post(url + "/v1/completions", json={"prompt": "ab"}, timeout=60)
    assert refused.status_code == 503
    assert command.process.wait(30) == 1
    command.reader.join(10)
    assert any(line.startswith("nv: ") and "SIGKILL" in line for line in command.lines)
    assert "Traceback" not in "".join(command.lines)


@pytest.mark.slow
def test_s05_a_killed_front_end_leaves_no_host(command):
    streams = [command.stream() for _ in range(NUM_STREAMS)]
    command.process.kill()
    command.process.wait()
    deadline = time.monotonic() + 5
    while not is_gone(command.host):
        assert time.monotonic() < deadline, "the host outlived its front end by 5 s"
        time.sleep(0.02)
    for end in streams:
        end.close()
