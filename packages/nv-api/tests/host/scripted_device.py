"""A device that draws the tokens of a script, under the real engine and in the real host.

`HostThread` runs the host on a thread of the test's process; what it shares with the front end is
the socket alone, as between two processes.
"""

import socket
import threading
import time

from nv_api.host.process import serve
from nv_api.host.wire import Wire
from nv_engine import Engine, ModelFacts
from nv_engine.batch import StepResult

EOS = 256
VOCAB_SIZE = 320


def echo(prompt):
    """The prompt once more, then EOS."""
    return [*prompt, EOS]


class Ready:
    def __init__(self, result):
        self._result = result

    def result(self):
        return self._result


class ScriptedDevice:
    """An executor whose sequences say `answer(prompt)`, and then EOS for ever.

    Args:
        answer: from a prompt's ids to the ids that follow.
        step_seconds: how long a step takes.
        fail_at: steps that raise `fault`.
    """

    def __init__(self, answer=echo, *, step_seconds=0.0, fail_at=(), fault=None, num_blocks=512):
        self.facts = ModelFacts(
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            max_model_len=2048,
            num_blocks=num_blocks,
            block_size=16,
        )
        self.answer, self.step_seconds = answer, step_seconds
        self.fail_at, self.fault = fail_at, fault
        self.num_steps = 0
        self.slots = {}
        self.is_closed = False

    def submit(self, batch):
        self.num_steps += 1
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.num_steps in self.fail_at:
            raise self.fault
        for each in batch.admissions:
            prompt = each.token_ids[: each.prompt_len]
            self.slots[each.slot] = (each.prompt_len, self.answer(prompt))
        steps = [
            [self._next(chunk, step) for chunk in batch.chunks if chunk.samples]
            for step in range(batch.num_steps)
        ]
        return Ready(StepResult(steps))

    def _next(self, chunk, step):
        prompt_len, script = self.slots[chunk.slot]
        place = chunk.start + chunk.num_tokens + step - prompt_len
        return script[place] if place < len(script) else EOS

    def close(self):
        self.is_closed = True


class HostThread:
    """As HostProcess, over an engine with a scripted device."""

    def __init__(self, device):
        self.device = device
        self.engine = None
        self.end, theirs = socket.socketpair()
        self.wire = Wire(theirs)
        self.error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            serve(self.wire, self._make)
        except BaseException as error:  # a process would end with its traceback
            self.error = error

    def _make(self, config):
        if isinstance(self.device, Exception):
            raise self.device
        self.engine = Engine(config, self.device)
        return self.engine

    def kill(self):
        """A thread cannot be killed: it ends by itself."""

    def reap(self):
        self.wait(5)
        assert not self._thread.is_alive(), "the host has ended"

    def wait(self, seconds):
        self._thread.join(seconds)

    def ending(self):
        return "its thread ended"
