"""A host process over a scripted device; NV_SCRIPT is what it says, as JSON.

Its fields are the arguments of `ScriptedDevice`, with `num_tokens` in place of `answer`: so many
letters, and then EOS. With `costs` the host writes into that file, at its end, the CPU time of its
dearest turns.
"""

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from nv_api.host.host import Host
from nv_api.host.process import HostProcess, serve
from nv_api.host.wire import Wire
from nv_engine import Engine
from scripted_device import ScriptedDevice

VARIABLE = "NV_SCRIPT"
NUM_KEPT = 5


class ScriptedHost(HostProcess):
    """A host whose device is scripted."""

    entry = "scripted_host:main"


def device(*, num_tokens=1000, max_model_len=2048, **options):
    letters = [65 + place % 20 for place in range(num_tokens)]
    made = ScriptedDevice(lambda _: letters, **options)
    made.facts = replace(made.facts, max_model_len=max_model_len)
    return made


def main(end):
    script = json.loads(os.environ[VARIABLE])
    costs = script.pop("costs", None)
    turns = [] if costs is None else counted_turns()
    serve(Wire(socket.socket(fileno=end)), lambda config: Engine(config, device(**script)))
    if costs is not None:
        Path(costs).write_text(json.dumps(sorted(turns)[-NUM_KEPT:]))
    os._exit(0)


def counted_turns():
    """Count the CPU time of each turn of the host: its frames, and a step; in milliseconds."""
    turns, turn = [], Host._serve

    def counted(self):
        began = time.thread_time()
        turn(self)
        turns.append(round((time.thread_time() - began) * 1e3, 2))

    Host._serve = counted
    return turns
