"""A request that has ended is freed at once: the garbage collector finds nothing of it.

A full collection beside a thousand streams holds the event loop up for a fifth of a second.
"""

import gc
import json
import socket

import pytest
from running_server import RunningServer
from scripted_device import ScriptedDevice

uvloop = pytest.importorskip("uvloop")

COMPLETION = "/v1/completions", {"prompt": [70] * 30, "max_tokens": 20}
CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20}


def send(server, path, body, *, leaves=False, keeps=False):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    closing = "" if keeps else "Connection: close\r\n"
    request = f"{head}{closing}Content-Length: {len(content)}\r\n\r\n".encode() + content
    with socket.create_connection(("127.0.0.1", server.port)) as end:
        for _ in range(3 if keeps else 1):
            end.sendall(request)
            received = end.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200"), received
            while keeps and not received.endswith(b"0\r\n\r\n"):
                received += end.recv(1 << 16)
        while not (leaves or keeps) and end.recv(1 << 16):
            pass


@pytest.mark.parametrize("request_of", [COMPLETION, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize("kind", ["streamed", "whole", "leaves", "keeps"])
def test_a_request_that_has_ended_leaves_no_circle(front_end, request_of, kind):
    server = RunningServer(
        lambda: front_end(ScriptedDevice(step_seconds=0.001)), uvloop.new_event_loop
    )
    path, body = request_of
    body = {**body, "ignore_eos": True, "stream": kind != "whole"}
    options = {"leaves": kind == "leaves", "keeps": kind == "keeps"}

    def requests():
        for _ in range(4):
            send(server, path, body, **options)
        server.until(server.is_idle)
        server.until(lambda: not server.server.server_state.connections)

    requests()  # what is made once
    gc.collect()
    gc.disable()
    try:
        requests()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = {type(each).__qualname__ for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    server.close()
    assert not found & {"Connection", "Answer", "Request", "RequestStream", "Guard", "Generation"}
