"""k6: a script of load, which fails if any of its checks does."""

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parent / "k6" / "load.js"


def test_ten_users_at_once(served):
    settings = {"NV_URL": served.v1, "NV_KEY": served.key, "NV_MODEL": served.model}
    words = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
    run = subprocess.run(
        ["k6", "run", "--quiet", "--no-usage-report", *words, str(SCRIPT)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "checks_total" in run.stdout
