"""The tests that openai and anthropic ship in their sdists, against the server.

NV_SDISTS is a folder with the unpacked sdists; their tests are not copied into this repository.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RESOURCES = "tests/api_resources"
CREATES = "create and not with_all_params"
"""A request with all parameters also asks for audio or a suffix, which is not built.

openai's tests of responses.create send either all parameters or none at all, not even an input, so
none of them can pass.
"""


@pytest.mark.parametrize(
    ("package", "base", "path", "chosen"),
    [
        ("openai", "/v1", "chat/test_completions.py", CREATES),
        ("openai", "/v1", "test_completions.py", CREATES),
        ("openai", "/v1", "test_models.py", "retrieve or list"),
        ("anthropic", "", "test_messages.py", "(create or count) and not with_all_params"),
    ],
)
def test_own(served, package, base, path, chosen):
    (folder,) = Path(os.environ["NV_SDISTS"]).glob(f"{package}-*/")
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--durations=0", "--tb=short"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", chosen, f"{RESOURCES}/{path}"],
        cwd=folder,
        env={**os.environ, "TEST_API_BASE_URL": f"{served.url}{base}"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed, found.stdout
    print(f"{package} {path}: {passed[0]}")
