"""Bytes on a socket that no client library sends: large heads, slow ones, other protocols."""

import json
import re
import select
import socket
import time
from contextlib import suppress

import pytest
from nv_api.server import connection


def talk(served, *parts, pause=0.0):
    """Send parts over one connection; returns all that comes back until the server closes it."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as end:
        received = b""
        with suppress(ConnectionError):  # closed before all was read
            for part in parts:
                end.sendall(part)
                time.sleep(pause)
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


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\r\n\r\n", head(f"A: {LONG}")])
def test_a_refusal_of_the_connection_has_an_id(served, sent):
    starts = [talk(served, sent).partition("\r\n\r\n")[0] for _ in range(2)]
    ids = [re.findall(r"(?m)^x-request-id: (\w{32})\r?$", start) for start in starts]
    assert [len(found) for found in ids] == [1, 1]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("begun", [b"GET /health HT", head()[:-2]], ids=["line", "headers"])
def test_a_head_that_does_not_end_is_refused_in_time(serve, begun):
    served = serve(listening={"head_timeout": 0.1})
    check_slow(talk(served, begun).removeprefix("HTTP/1.1 "), "head")


def test_a_second_head_that_does_not_end_is_refused_in_time(serve):
    served = serve(listening={"head_timeout": 0.1})
    _, first, second = talk(served, head(), b"GET /v", pause=0.05).split("HTTP/1.1 ")
    assert first.startswith("200 OK")
    check_slow(second, "head")


def test_a_line_end_in_place_of_a_second_head_does_not_keep_the_connection(serve):
    served = serve(listening={"head_timeout": 0.1})
    assert talk(served, head(), b"\r\n", pause=0.05).count("HTTP/1.1 ") == 1


def check_slow(answer, part):
    assert answer.startswith("408 Request Timeout")
    error = json.loads(answer.partition("\r\n\r\n")[2])["error"]
    assert error["code"] == "request_timeout"
    assert error["message"].startswith(f"the {part} of the request is not complete after 0.1 s")


def test_a_connection_without_a_request_is_closed_without_an_answer(serve):
    assert talk(serve(listening={"head_timeout": 0.1})) == ""


def test_a_head_that_comes_slowly_is_refused_although_it_goes_on(serve):
    served = serve(listening={"head_timeout": 0.1})

    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as end:
        for byte in head():
            if select.select([end], [], [], 0.02)[0]:
                break
            end.sendall(bytes([byte]))
        else:
            raise AssertionError("the whole head was taken")
        check_slow(end.recv(65536).decode().removeprefix("HTTP/1.1 "), "head")


@pytest.mark.parametrize("coding", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_a_body_that_does_not_end_is_refused_in_time(serve, caplog, coding):
    served = serve(listening={"body_timeout": 0.1})
    begun = "5\r\nabcde\r\n" if "chunked" in coding else "abcde"
    lines = ["Content-Type: application/json", coding]
    asked = head(*lines, line="POST /v1/completions HTTP/1.1") + begun.encode()
    check_slow(talk(served, asked).removeprefix("HTTP/1.1 "), "body")
    served.until(served.idle)
    assert served.llm.submitted == []
    assert not caplog.records
    assert served.complete("ab").status_code == 200


def test_an_answer_may_take_longer_than_its_request(serve):
    served = serve({"pace": 0.02}, listening={"head_timeout": 0.05, "body_timeout": 0.05})
    body = b'{"prompt": "abcdefghijkl"}'
    lines = ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    asked = head(*lines, line="POST /v1/completions HTTP/1.1") + body
    answers = talk(served, asked + b"GET /vers").split("HTTP/1.1 ")
    assert [answer[:3] for answer in answers] == ["", "200", "408"]
    assert '"text":"abcdefghijkl"' in answers[1]


def ask_and_end(served, body):
    """Send a request, end this side of the connection, and read the other to its end."""
    content = json.dumps(body).encode()
    lines = ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as end:
        end.sendall(head(*lines, line="POST /v1/completions HTTP/1.1") + content)
        end.shutdown(socket.SHUT_WR)
        received = b""
        while more := end.recv(65536):
            received += more
    return received.decode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_with_its_request_gets_the_answer(serve, monkeypatch, stream):
    monkeypatch.setattr(connection, "HALF_CLOSE_SECONDS", 5.0)  # on a busy machine, too
    served = serve({"pace": 0.01})
    answer = ask_and_end(served, {"prompt": "abcdef", "stream": stream})
    assert answer.startswith("HTTP/1.1 200 OK")
    assert "".join(re.findall(r'"text":"(\w*)"', answer)) == "abcdef"
    assert served.llm.aborted == []
    served.until(lambda: not served.server.server_state.connections)


def test_a_client_that_ends_its_side_later_has_left(serve, monkeypatch):
    monkeypatch.setattr(connection, "HALF_CLOSE_SECONDS", 0.0)
    served = serve({"pace": 0.01})
    assert ask_and_end(served, {"prompt": "abcdef"}) == ""
    served.until(served.idle)
    assert served.llm.aborted == [0]


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
