"""A step for which the card has not enough memory, seen by the clients of the server."""

import httpx
import pytest
from scripted_device import ScriptedDevice

FAULT = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
LETTERS = [65] * 40


class FailingOnce(ScriptedDevice):
    """Fails in the step after `fails` was set."""

    fails = False

    def submit(self, batch):
        if self.fails:
            self.fails = False
            raise FAULT
        return super().submit(batch)


def streamed_error(served, device, body, events):
    """The last event of a stream whose step fails once it has begun."""
    body = {**body, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as response:
        assert response.status_code == 200
        parts = response.iter_text()
        text = next(parts)
        device.fails = True
        return events(text + "".join(parts))[-1]["error"]


def plain_error(served, device, body, events):
    device.fails = True
    failed = served.post("/v1/completions", body)
    assert failed.status_code == 500
    return failed.json()["error"]


@pytest.mark.parametrize("error_of", [streamed_error, plain_error])
def test_s06_a_step_without_memory_fails_its_requests_and_the_next_works(
    engine_server, events, error_of
):
    device = FailingOnce(lambda _: LETTERS, step_seconds=0.01)
    served = engine_server(device)
    body = {"prompt": [5, 6], "max_tokens": 30, "ignore_eos": True}
    error = error_of(served, device, body, events)
    assert error["type"] == "server_error"
    assert "out of memory" in error["message"]
    whole = served.post("/v1/completions", body).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    assert len(whole["text"]) == 30
    served.until(lambda: served.llm.stats.num_running == 0)
    assert served.llm.stats.num_free_blocks == served.llm.stats.num_blocks
    assert served.client.get("/load").json() == {"server_load": 0}
    assert served.client.get("/health").status_code == 200
