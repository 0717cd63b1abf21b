"""Profiles a run with torch's profiler: the device's busy share, and the time per kernel."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


def profiled(work: Callable[[], object], top: int = 15) -> dict[str, Any]:
    """Run `work` once under the profiler.

    Returns:
        busy_share of the time from the first to the last kernel, milliseconds of the span, and the
        `top` kernels by time with their share and count.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, reach, total = 0.0, spans[0][0], spans[-1][1] - spans[0][0]
    by_name: dict[str, list[float]] = defaultdict(list)
    for start, end, name in spans:
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
        by_name[name].append(end - start)
    table = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    return {
        "busy_share": round(busy / total, 4),
        "span_ms": round(total / 1e3, 2),
        "kernels": [
            {"name": name[:80], "ms": round(sum(t) / 1e3, 2), "count": len(t)} for name, t in table
        ],
    }
