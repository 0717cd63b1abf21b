"""`nv serve` in a process of its own, over a tiny checkpoint: what the tests of clients talk to.

A client's environment need not hold nv: NV_SERVER_PYTHON is the Python of one that does.
"""

import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PYTHON = os.environ.get("NV_SERVER_PYTHON", sys.executable)
NAMES = ["tiny", "gpt-6-astra", "gpt-3.5-turbo-instruct", "claude-opus-5-5", "model", "model_id"]
"""Of the model. The first is for our tests, as clients drop fields for the names of models that
they know; the others are in the tests of openai and anthropic."""
KEYS = ["sk-right", "My API Key", "my-anthropic-api-key"]
"""The first is for our tests, the others are those of openai and anthropic."""
OPTIONS = [
    *("--device=cpu", "--dtype=float32", "--max-model-len=1024", "--max-num-seqs=32"),
    *("--num-kvcache-blocks=256", "--kvcache-block-size=256", "--port=0"),
    "--tool-call-parser=hermes",
]
MAKE = "import sys; from pathlib import Path; from tiny_checkpoint import make; "
LOADING_SECONDS = 300
MAX_EXAMPLES = 20
"""Of schemathesis, for each route."""
NOT_DECLARED = "positive_data_acceptance"
"""A JSON schema cannot say all that the server refuses: null characters, or a name of a model."""


@dataclass(frozen=True)
class Served:
    """A server: its address, a model's name and the key."""

    url: str
    folder: Path
    """Of the checkpoint."""
    python: str = PYTHON
    """Of an environment with nv."""
    model: str = NAMES[0]
    key: str = KEYS[0]

    @property
    def v1(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A random model of two layers, whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    code = f"{MAKE}make(Path({str(folder)!r}), max_position_embeddings=1024)"
    subprocess.run([PYTHON, "-c", code], cwd=TESTS, check=True)
    return folder


@pytest.fixture(scope="module")
def served(request, folder):
    """One server for all tests of a client, whose file may have MORE_OPTIONS."""
    more = getattr(request.module, "MORE_OPTIONS", ())
    words = [f"--served-model-name={name}" for name in NAMES] + [f"--api-key={k}" for k in KEYS]
    process = subprocess.Popen(
        [PYTHON, "-m", "nv_api", "serve", str(folder), *OPTIONS, *more, *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "NV_LOG": "info", "OMP_NUM_THREADS": "1"},
    )
    lines, urls, told = [], [], threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"ready: (http://\S+) serves", line):
                urls.append(found[1])
                told.set()
        told.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        told.wait(LOADING_SECONDS)
        assert urls, "".join(lines)
        yield Served(urls[0], folder)
    finally:
        process.terminate()
        exit_code = process.wait(60)
        reader.join(10)
        process.stderr.close()
    assert exit_code == 0
    assert "Traceback" not in "".join(lines), "".join(lines)


@pytest.fixture
def schemathesis(served, tmp_path):
    """Runs schemathesis over a server's routes; returns what it prints."""

    def run(*options):
        program = Path(sys.executable).with_name("schemathesis")
        found = subprocess.run(
            [
                *(program, "run", f"{served.url}/openapi.json", f"--max-examples={MAX_EXAMPLES}"),
                *(f"--exclude-checks={NOT_DECLARED}", "--request-timeout=60", "--no-color"),
                *("--header", f"Authorization: Bearer {served.key}", "--seed=1", *options),
            ],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stdout
        return found.stdout

    return run
