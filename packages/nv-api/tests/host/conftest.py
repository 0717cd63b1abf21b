"""A front end over a scripted device."""

import sys
from pathlib import Path

import nv_api.async_llm
import pytest

sys.path.append(str(Path(__file__).parent))

from scripted_device import HostThread, ScriptedDevice


@pytest.fixture
def front_end(monkeypatch, folder):
    """Make an AsyncLLM over a scripted device; `hosts` lists what was started."""

    def make(device=None, **options):
        device = ScriptedDevice() if device is None else device
        host = HostThread(device)
        make.hosts.append(host)
        monkeypatch.setattr(nv_api.async_llm, "HostProcess", lambda: host)
        return nv_api.async_llm.AsyncLLM(str(folder), **options)

    make.hosts = []
    return make
