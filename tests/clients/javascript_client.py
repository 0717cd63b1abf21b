"""npm openai and the AI SDK: each a script for Node, which asserts by itself.

NV_NODE_MODULES is a folder in which npm has installed them.
"""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "javascript").glob("*.mjs"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script(served, script):
    given = {"NV_URL": served.v1, "NV_KEY": served.key, "NV_MODEL": served.model}
    done = subprocess.run(
        ["node", str(script)],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
