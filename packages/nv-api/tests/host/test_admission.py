"""Which requests are refused while the engine, a real one, is at work."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from running_server import RunningServer
from scripted_device import ScriptedDevice


class Held(ScriptedDevice):
    """A device whose steps wait for `go`."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def submit(self, batch):
        assert self.go.wait(20)
        return super().submit(batch)


@pytest.fixture
def device():
    return Held()


@pytest.fixture
def server(front_end, device):
    server = RunningServer(lambda: front_end(device, max_num_seqs=4), max_queue=4)
    yield server
    device.go.set()
    server.close()


def test_as_many_as_run_and_wait_are_accepted_and_one_more_is_not(server, device):
    def complete(_):
        return server.client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4})

    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(complete, number) for number in range(8)]
        server.until(lambda: server.service.admission.num_in_flight == 8, seconds=5)
        assert server.service.admission.num_waiting == 4
        refused = complete(8)
        device.go.set()
        assert [answer.result().status_code for answer in answers] == [200] * 8
    assert refused.status_code == 429
    assert "4 sequences wait for the engine: at most 4 may" in refused.json()["error"]["message"]
    server.until(lambda: server.service.admission.num_in_flight == 0)
    assert complete(9).status_code == 200
