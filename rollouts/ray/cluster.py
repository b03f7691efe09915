"""Connecting a program to Ray, and the end of its actors."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import ray
from ray._private import ray_constants
from ray.exceptions import RayError

from rollouts.errors import RolloutsError

_REACHABLE: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def connect(address: str | None = None) -> None:
    """Connect this process to a Ray cluster; where it is connected, do nothing.

    `address` is that of `ray.init`; without one it is that of the environment variable RAY_ADDRESS, which
    `ray job submit` sets. Where there is none either, a cluster of this machine alone is started: on the loopback
    address, without a dashboard and without usage reports. It ends with this process. Raises `RolloutsError`.
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        if address:
            ray.init(address=address, logging_level="WARNING")
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            with _on_loopback():
                ray.init(address="local", logging_level="WARNING", include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        cure = "start it (`ray start --head`), or correct the address" if address else "see the message above"
        where = f"the Ray cluster at {address}" if address else "Ray"
        raise RolloutsError(f"{where}: {error or type(error).__name__}; {cure}") from error


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Start the processes of Ray on the loopback address.

    On Linux, Ray replaces a loopback address by that of the machine, `_node_ip_address` too, unless this variable is 0
    in its processes, and was when this one imported ray.
    """
    before, was_reachable = os.environ.get(_REACHABLE), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_REACHABLE], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was_reachable
        if before is None:
            del os.environ[_REACHABLE]
        else:
            os.environ[_REACHABLE] = before


def require_connection() -> None:
    """Raise `RolloutsError` unless this process is connected: Ray would start a cluster with open ports."""
    if not ray.is_initialized():
        cure = 'call rollouts.ray.connect(), or ray.init(address="auto"), first'
        raise RolloutsError(f"Ray: this process is not connected to a cluster; {cure}")


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
