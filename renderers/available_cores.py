"""How many processor cores this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """The cores that the process may run on (`taskset`, cpusets of containers); all where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
