"""The README's first screen: its example runs, and its test command is the one that CI runs."""

import json
import re
import socket
import subprocess
import sys
import time
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


def test_the_server_answers_the_curl(tmp_path: Path) -> None:
    serve, curl = re.findall(r"```bash\n((?:uv run nv serve|curl).*?)```", README, re.DOTALL)
    assert serve == "uv run nv serve demo\n"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "nv_api", "serve", "demo", "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 180
        script = curl.replace("curl http://127.0.0.1:8000/", f"curl -s http://127.0.0.1:{port}/")
        answer: dict[str, object] = {}
        while "choices" not in answer and server.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            done = subprocess.run(
                ["bash", "-c", script], check=False, capture_output=True, text=True
            )
            answer = json.loads(done.stdout or "{}")
            time.sleep(0.2)
        assert "Paris" in str(answer["choices"])
    finally:
        server.terminate()
        code = server.wait(60)
    assert code == 0, (tmp_path / "log").read_text()
