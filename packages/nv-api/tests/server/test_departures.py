"""Clients that leave, do not read, or share an id: no other client is disturbed."""

import asyncio
import json
import re
import socket
import time

import httpx
import pytest
from nv_api.server.connection import HALF_CLOSE_SECONDS


def request_bytes(path, body, **headers):
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def connect(served, body, path="/v1/completions", **options):
    end = socket.socket()
    for option, value in options.items():
        end.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
    end.connect(("127.0.0.1", served.port))
    end.sendall(request_bytes(path, body))
    return end


def with_small_buffers(served):
    """A client that does not read stops the server's writes early."""
    served.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def reset(end):
    """Close a connection as a crash does: with RST."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    end.close()


@pytest.mark.parametrize("hang_up", [reset, socket.socket.close], ids=["reset", "close"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["queued", "before the first token", "later"])
def test_s01_a_client_that_leaves_is_aborted(serve, moment, stream, hang_up):
    served = serve(script={"answers": [[5] * 10_000] * 2, "max_model_len": 20_000, "num_slots": 1})
    served.llm.pace = 0.002
    body = {"prompt": "ab", "max_tokens": 10_000, "stream": stream, "n": 1}
    if moment == "queued":
        first = connect(served, {**body, "stream": True})
        served.until(lambda: len(served.llm.running) == 1)
    if moment == "before the first token":
        served.llm.paused = True
    end = connect(served, body)
    wanted = 2 if moment == "queued" else 1
    served.until(lambda: len(served.llm.submitted) == wanted)
    if moment == "later":
        served.until(lambda: any(r.request.completions[0].token_ids for r in served.llm.running))
        if stream:
            assert b"200 OK" in end.recv(1000)
    if hang_up is not reset:  # at once, it would be a client that waits for its answer
        time.sleep(HALF_CLOSE_SECONDS)
    hang_up(end)
    served.until(lambda: len(served.llm.aborted) == 1, seconds=2)
    if moment == "queued":
        reset(first)
    served.until(served.idle)
    assert served.llm.stats.num_running == served.llm.stats.num_waiting == 0
    assert served.client.get("/load").json() == {"server_load": 0}
    served.llm.paused = False
    assert served.complete("ab").status_code == 200


def test_s01_a_client_that_leaves_while_its_prompt_is_tokenized(serve):
    served = serve()
    begun = []

    async def slowly(prompts, **_):
        begun.append(prompts)
        await asyncio.sleep(30)

    served.llm.tokenize = slowly
    end = connect(served, {"prompt": "ab"})
    served.until(lambda: begun)
    assert served.service.admission.num_in_flight == 1
    reset(end)
    served.until(served.idle)
    assert served.llm.submitted == []


def test_s01_a_client_that_leaves_while_it_sends_its_body(serve):
    served = serve()
    end = socket.socket()
    end.connect(("127.0.0.1", served.port))
    end.sendall(request_bytes("/v1/completions", {"prompt": "a" * 1000})[:-500])
    time.sleep(0.05)
    reset(end)
    assert served.complete("ab").status_code == 200
    served.until(served.idle)


def test_s01_a_client_that_leaves_after_it_sent_a_second_request(serve, caplog):
    served = serve(script={"answers": [[5] * 2000], "max_model_len": 20_000, "pace": 0.002})
    body = {"prompt": "ab", "max_tokens": 2000, "stream": True}
    end = connect(served, body)
    assert b"200 OK" in end.recv(1000)
    end.sendall(request_bytes("/v1/completions", body))
    time.sleep(0.05)
    reset(end)
    served.until(lambda: served.llm.aborted == [0], seconds=2)
    served.until(served.idle)
    assert not caplog.records


def test_s01_several_prompts_of_one_client(serve):
    served = serve(script={"answers": [[5] * 10_000] * 4, "max_model_len": 20_000, "pace": 0.002})
    end = connect(
        served, {"prompt": ["a", "b", "c", "d"], "n": 2, "max_tokens": 9000, "stream": True}
    )
    served.until(lambda: len(served.llm.running) == 4)
    reset(end)
    served.until(lambda: sorted(served.llm.aborted) == [0, 1, 2, 3])
    served.until(served.idle)


NUM_OTHERS = 20


def ask_others(served):
    """Seconds of a few requests, one after the other."""
    began = time.monotonic()
    for _ in range(NUM_OTHERS):
        assert served.complete("hello", stream=True).text.endswith("data: [DONE]\n\n")
        assert served.client.get("/health").status_code == 200
    return time.monotonic() - began


def test_s28_clients_that_never_read_end_and_disturb_no_other(serve):
    served = serve(
        script={
            "answers": [[5]] * NUM_OTHERS + [[5] * 40_000] * 5,
            "max_model_len": 50_000,
            "pace": 0.0001,
        },
        write_timeout=0.5,
    )
    alone = ask_others(served)
    with_small_buffers(served)
    body = {"prompt": "ab", "max_tokens": 40_000, "stream": True, "return_token_ids": True}
    deaf = [connect(served, body, SO_RCVBUF=2048) for _ in range(5)]
    served.until(lambda: len(served.llm.submitted) == NUM_OTHERS + 5)
    assert ask_others(served) < 15 + 10 * alone
    served.until(served.idle, seconds=30)
    assert sorted(served.llm.aborted) == [NUM_OTHERS + number for number in range(5)]
    served.until(lambda: len(served.server.server_state.connections) <= 1)
    for end in deaf:
        end.close()


def test_a_slow_reader_gets_several_tokens_in_one_event(serve, events):
    served = serve(script={"answers": [[5] * 5000], "max_model_len": 10_000})
    with_small_buffers(served)
    end = connect(served, {"prompt": "ab", "max_tokens": 5000, "stream": True}, SO_RCVBUF=2048)
    served.until(lambda: served.llm.submitted and not served.llm.running, seconds=20)
    assert served.service.lifecycle.guards, "the stream waits for its reader"
    received = b""
    while b"[DONE]" not in received:
        received += end.recv(65536)
    text = received.decode().partition("\r\n\r\n")[2]
    chunks = re.findall(r'"text":"(&*)"', text)
    assert "".join(chunks) == "&" * 5000
    assert len(chunks) < 2500
    end.close()


def test_s30_one_id_twice_at_once(serve):
    served = serve(script={"pace": 0.005})

    async def twice():
        async with httpx.AsyncClient(base_url=served.url) as client:
            return await asyncio.gather(
                *(
                    client.post(
                        "/v1/completions",
                        json={"prompt": prompt},
                        headers={"x-request-id": "same"},
                    )
                    for prompt in ("ab", "cd")
                )
            )

    answers = asyncio.run(twice())
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["ab", "cd"]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]


def test_s30_an_id_of_sixty_kilobytes(serve):
    served = serve()
    response = served.client.post(
        "/v1/completions", json={"prompt": "ab"}, headers={"x-request-id": "x" * 60_000}
    )
    assert response.status_code == 200
    assert len(response.headers["x-request-id"]) == 32
    for odd in "a b", "a\tb", "":
        response = served.client.get("/health", headers={"x-request-id": odd})
        assert len(response.headers["x-request-id"]) == 32


def test_a_connection_serves_many_requests(serve):
    served = serve()
    for _ in range(5):
        assert served.complete("ab").status_code == 200
        assert served.complete("ab", stream=True).status_code == 200
    assert len(served.server.server_state.connections) == 1
