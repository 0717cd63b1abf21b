"""schemathesis: the server answers as /openapi.json declares, and never with a 5xx."""

import os
import re
import subprocess
import sys
from pathlib import Path

MAX_EXAMPLES = 20
MORE_OPTIONS = ["--max-model-len=128"]
"""A request that gives no length has an answer as long as the context."""
NOT_DECLARED = "positive_data_acceptance"
"""A JSON schema cannot say all that the server refuses: null characters, or a name of a model."""


def test_openapi(served, tmp_path):
    program = Path(sys.executable).with_name("schemathesis")
    found = subprocess.run(
        [
            *(program, "run", f"{served.url}/openapi.json", f"--max-examples={MAX_EXAMPLES}"),
            *(f"--exclude-checks={NOT_DECLARED}", "--request-timeout=60", "--no-color"),
            *("--header", f"Authorization: Bearer {served.key}", "--seed=1"),
        ],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout
    assert re.search(r"Tested: 25\b", found.stdout), found.stdout
