"""Bytes on a socket that no client library sends: large heads, offers of other protocols."""

import json
import socket
from contextlib import suppress

import pytest


def talk(served, *parts):
    """Send parts over one connection; returns all that comes back until the server closes it."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as end:
        received = b""
        with suppress(ConnectionError):  # closed before all was read
            for part in parts:
                end.sendall(part)
            while more := end.recv(65536):
                received += more
    return received.decode()


def head(*headers, line="GET /health HTTP/1.1"):
    return "\r\n".join([line, "Host: x", *headers, "", ""]).encode()


LONG = "x" * (64 << 10)


@pytest.mark.parametrize(
    "parts",
    [
        [head(f"A: {LONG}")],
        [head(line=f"GET /{LONG} HTTP/1.1")],
        [head(*[f"A{i}: {LONG[:2000]}" for i in range(40)])],
        [head(f"A: {LONG}")[:-4]],
        [head(*["A: b"] * 256)],
    ],
    ids=["header", "url", "headers", "no end", "number"],
)
def test_a_large_head_is_refused(served, parts):
    start, _, body = talk(served, *parts).partition("\r\n\r\n")
    assert start.startswith("HTTP/1.1 431 Request Header Fields Too Large")
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert served.client.get("/health").status_code == 200


def test_a_large_head_after_a_request_closes_the_connection(served):
    assert "431" not in talk(served, head() + head(f"A: {LONG}"))


def test_a_trailer_without_an_end_closes_the_connection(served):
    first = head("Transfer-Encoding: chunked", line="POST /nothing HTTP/1.1")
    talk(served, first + b"1\r\nx\r\n0\r\nTrailer: ", 8 * LONG.encode())


def test_a_head_just_below_the_bounds_is_taken(served):
    headers = ["Connection: close", *["A: b"] * 253, f"B: {LONG[:60_000]}"]
    assert talk(served, head(*headers)).startswith("HTTP/1.1 200 OK")


def test_a_body_may_be_larger_than_a_head(served):
    body = b'{"prompt": "ab"}' + b" " * (256 << 10)
    lines = ["Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close"]
    answer = talk(served, head(*lines, line="POST /v1/completions HTTP/1.1"), body)
    assert answer.startswith("HTTP/1.1 200 OK")


def test_what_is_not_http_gets_an_error_in_our_form(served):
    start, _, body = talk(served, b"\x16\x03\x01\r\n\r\n").partition("\r\n\r\n")
    assert start.startswith("HTTP/1.1 400 Bad Request")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize("offer", ["h2c", "websocket"])
def test_an_offer_of_another_protocol_is_ignored(served, caplog, offer, pause):
    body = b'{"prompt": "ab"}'
    offered = [f"Upgrade: {offer}", "HTTP2-Settings: AAMAAABkAAQAAP__"]
    lines = ["Content-Type: application/json", f"Content-Length: {len(body)}", *offered]
    first = head(
        "Connection: Upgrade, HTTP2-Settings", *lines, line="POST /v1/completions HTTP/1.1"
    )
    last = head("Connection: Upgrade, close", *offered, line="GET /version HTTP/1.1")
    parts = [first, body, last] if pause else [first + body + last]
    answer = talk(served, *parts)
    assert answer.count("HTTP/1.1 200 OK") == 2
    assert '"text":"ab"' in answer
    assert '"version"' in answer
    assert not caplog.records


def test_a_slash_at_the_end_is_no_redirect_to_the_host_that_a_client_names(served):
    asked = b"POST /v1/embeddings/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    start, _, body = talk(served, asked).partition("\r\n\r\n")
    assert start.startswith("HTTP/1.1 404 Not Found")
    assert "evil.example" not in start
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/health", "/ready", "/"])
def test_head_is_get_without_a_body(served, path):
    answer = talk(served, head("Connection: close", line=f"HEAD {path} HTTP/1.1"))
    assert answer.startswith("HTTP/1.1 200 OK")
    assert answer.endswith("\r\n\r\n")
    length = len(served.client.get(path).content)
    assert f"content-length: {length}\r\n" in answer
