"""Makes `rank_workers` importable, here and in the ranks that are spawned from here."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


def child_processes():
    """Process ids of this process's children."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:  # it ended meanwhile
            continue
        if int(text.rpartition(")")[2].split()[1]) == os.getpid():
            found.append(int(status.parent.name))
    return found


@pytest.fixture(name="child_processes")
def _child_processes():
    return child_processes


@pytest.fixture
def no_orphans():
    """The test leaves no process running."""
    before = set(child_processes())
    yield
    assert set(child_processes()) <= before
