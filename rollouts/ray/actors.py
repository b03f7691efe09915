"""The end of actors: why one was lost, and how one is ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError


def loss_reason(error: RayError) -> str:
    """What Ray reports of an actor that is lost: the name of the error, the first line of its text and the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason is known"]
    return f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}"


async def end_actor(actor: Any, stop_seconds: float) -> None:
    """End an actor, whose `stop` has so many seconds."""
    if not ray.is_initialized():  # the actors have ended with the connection
        return
    with suppress(RayError, TimeoutError):
        await asyncio.wait_for(actor.stop.remote(), stop_seconds)
    ray.kill(actor)
