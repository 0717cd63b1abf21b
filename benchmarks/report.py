"""One JSON line per benchmark: figures with their machine, versions and commit."""

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ["torch", "triton", "transformers", "nv-api", "vllm", "nano-vllm", "xllamacpp"]
ROOT = Path(__file__).parent.parent


def machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), "cpu")
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit measured: of the checkout, or NV_COMMIT outside a git repository."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return os.environ.get("NV_COMMIT") or found.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    installed = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {name: installed[name] for name in PACKAGES if name in installed}


def report(benchmark: str, figures: dict[str, Any], save: str | None = None) -> None:
    """Print the line, and write it to `save` too."""
    line = {
        "benchmark": benchmark,
        **figures,
        "machine": machine(),
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit(),
    }
    text = json.dumps(line)
    print(text, flush=True)
    if save:
        Path(save).write_text(json.dumps(line, indent=1) + "\n")


def read_ceiling(num_bytes: int = 4 * 2**30, repeats: int = 10) -> float:
    """Bytes per second that a large device-to-device copy moves, read and written."""
    source = torch.randint(0, 100, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), repeats)


def matmul_ceiling(size: int = 8192, repeats: int = 10) -> float:
    """FLOPs per second of a bf16 size x size x size product of random values."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, repeats)


def _seconds(work: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[2:])[repeats // 2]
