"""Broken HTTP and JSON over a socket: the engine sees none of it, and the server goes on.

Each draw takes a request that is right and breaks it; its seed is in the test's name.
"""

import json
import random
import socket
from contextlib import suppress

import pytest

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]
NUM_DRAWS = 25
"""Connections of a seed."""
JUNK = [b"\0", b"\r\n", b"\n", b"\xff\xfe", b"{", b'"', b"]", b",", b"1e999", b"\\ud800", b"0" * 30]


def request(draw):
    """The first line, the headers and the body of a request that is nearly right."""
    body = {
        "prompt": "ab",
        "input": "ab",
        "messages": [{"role": "user", "content": "ab"}],
        "max_tokens": 3,
        "stream": draw.random() < 0.5,
    }
    content = json.dumps(body).encode()
    headers = [b"Host: x", b"Content-Type: application/json"]
    return b"POST %s HTTP/1.1" % draw.choice(PATHS).encode(), headers, content


def with_broken_json(draw):
    """A body that is not JSON, of the right length."""
    line, headers, content = request(draw)
    while is_object(content):
        place = draw.randrange(len(content))
        kind = draw.randrange(3)
        if kind == 0:
            content = content[:place]
        elif kind == 1:
            content = content[:place] + draw.choice(JUNK) + content[place:]
        else:
            content = content[:place] + content[place + draw.randint(1, 9) :]
    return joined(line, [*headers, b"Content-Length: %d" % len(content)], content)


def is_object(content):
    try:
        return isinstance(json.loads(content), dict)
    except ValueError:
        return False


def with_a_wrong_length(draw):
    """A Content-Length that is a word, comes twice, is too large, or comes beside chunks."""
    line, headers, content = request(draw)
    length = b"Content-Length: %d"
    lengths = draw.choice(
        [
            [length % (len(content) + draw.randint(1, 99))],
            [b"Content-Length: -1"],
            [b"Content-Length: 0x1f"],
            [b"Content-Length: " + b"9" * 30],
            [length % len(content), length % (len(content) - 1)],
            [length % len(content), b"Transfer-Encoding: chunked"],
            [length % draw.randrange(len(content))],
        ]
    )
    return joined(line, headers + draw.sample(lengths, len(lengths)), content)


def with_broken_chunks(draw):
    """Chunks whose sizes are wrong, or which have no end."""
    line, headers, content = request(draw)
    sizes = [b"zz", b"-1", b"f" * 20, b"%x" % (len(content) + 7), b"%x" % (len(content) - 1), b""]
    chunk = draw.choice(sizes) + b"\r\n" + content + draw.choice([b"\r\n0\r\n\r\n", b"", b"0"])
    return joined(line, [*headers, b"Transfer-Encoding: chunked"], chunk)


def with_a_broken_head(draw):
    """A first line or headers that are not HTTP."""
    line, headers, content = request(draw)
    headers.append(b"Content-Length: %d" % len(content))
    junk = bytes(draw.choices(range(256), k=draw.randint(1, 30)))
    kind = draw.randrange(4)
    if kind == 0:
        line = line.replace(b"POST", junk)
    elif kind == 1:
        line = line.replace(b"HTTP/1.1", draw.choice([b"HTTP/9.9", b"HTTP", junk]))
    elif kind == 2:
        headers.insert(0, b"\0" + junk)
    else:
        headers = [header.replace(b":", b"") for header in headers]
    return joined(line, headers, content)


def that_is_cut(draw):
    """A request that ends anywhere before its end."""
    line, headers, content = request(draw)
    whole = joined(line, [*headers, b"Content-Length: %d" % len(content)], content)
    return whole[: draw.randrange(len(whole))]


def joined(line, headers, content):
    return b"\r\n".join([line, *headers, b"", b""]) + content


BREAKS = [
    with_broken_json,
    with_a_wrong_length,
    with_broken_chunks,
    with_a_broken_head,
    that_is_cut,
]


def answer(served, sent):
    """All that comes back until the server closes the connection, or needs more."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as end:
        received = b""
        with suppress(ConnectionError):
            end.sendall(sent)
            end.shutdown(socket.SHUT_WR)
            while more := end.recv(65536):
                received += more
    return received


def counters(served):
    """The counters of the engine and the server."""
    return len(served.llm.submitted), served.llm.stats, served.service.metrics.endings.copy()


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
@pytest.mark.parametrize("seed", [1, 2])
def test_broken_requests_leave_the_engine_still(served, broken, seed):
    draw = random.Random(f"{broken.__name__} {seed}")
    before, statuses = counters(served), set()
    for _ in range(NUM_DRAWS):
        sent = broken(draw)
        for part in answer(served, sent).split(b"HTTP/1.1 ")[1:]:
            status, (head, _, body) = int(part[:3]), part.partition(b"\r\n\r\n")
            statuses.add(status)
            assert status in (400, 404, 405, 411, 413, 415, 431), sent
            assert b"x-request-id: " in head, sent
            assert "error" in json.loads(body), sent
    assert statuses or broken is that_is_cut, "some are answered"
    served.until(served.idle)
    assert counters(served) == before
    assert served.complete("ab").json()["choices"][0]["text"] == "ab"
    assert served.client.get("/health").status_code == 200
