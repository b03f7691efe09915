"""Whether the caller is on a thread that must not wait for a network."""

from __future__ import annotations

import sys


def on_event_loop() -> bool:
    """Whether an event loop runs on this thread."""
    if "asyncio" not in sys.modules:  # importing it takes time that a program without it need not spend
        return False
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
