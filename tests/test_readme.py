"""The README's first screen: its example runs, and its test command is the one that CI runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    exec(compile(block[1], "README.md", "exec"), {})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) >= 2
    assert all(any(letter.isalpha() for letter in line) for line in lines[:2])


def test_ci_runs_the_test_command() -> None:
    command = "uv run nox"
    assert f"pip install uv && {command}\n" in README
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == command
