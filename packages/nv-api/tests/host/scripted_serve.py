"""`nv serve` over a scripted host, for tests in processes: its words are the command's.

The first line of stderr is the host's process id.
"""

import sys

import nv_api.async_llm
import nv_api.server.run
from nv_api.cli import app
from scripted_host import ScriptedHost


class Announced(ScriptedHost):
    def __init__(self):
        super().__init__()
        print(f"host {self.process_id}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    nv_api.async_llm.HostProcess = Announced
    nv_api.server.run.LINGER_SECONDS = 5.0  # a busy machine has time to ask for /health
    app()
