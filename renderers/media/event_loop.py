"""Whether an event loop runs on the calling thread, which then must not wait for a network."""

from __future__ import annotations

import sys


def on_event_loop() -> bool:
    """Whether an event loop runs on this thread."""
    if "asyncio" not in sys.modules:  # a program without asyncio does not pay for importing it
        return False
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
