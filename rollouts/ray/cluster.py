"""Connecting a program to Ray, and the errors of clusters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import ray
from ray._private import ray_constants

from rollouts.errors import RolloutsError


class RayConnectionError(RolloutsError):
    """This process cannot use a Ray cluster. `address` is the address of the cluster, empty where none was given.

    Cure: connect with `ray.init`, or start the cluster that the address names.
    """

    def __init__(self, address: str, reason: str, cure: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(f"{f'the Ray cluster at {address}' if address else 'Ray'}: {reason}; {cure}")


class RayWorkerStartError(RolloutsError):
    """Workers on Ray do not start. `worker` is the name of the one that failed last, `reason` what it reports.

    Cure: add nodes that have what `actor_options` ask for, or ask for less; read the reason for an error of the worker
    itself.
    """

    def __init__(self, worker: str, reason: str, cure: str) -> None:
        self.worker = worker
        self.reason = reason
        super().__init__(f"worker {worker:.80} cannot be started: {reason}; {cure}")


class RayJobError(RolloutsError):
    """A worker could not run an episode at all, as when it cannot decode the task. `worker` is its name.

    Cure: let the workers import the modules that declare the task and the environment; read the worker's log.
    """

    def __init__(self, worker: str, reason: str) -> None:
        self.worker = worker
        self.reason = reason
        super().__init__(f"worker {worker:.80} could not run the episode: {reason}")


class StoredEpisodesLostError(RolloutsError):
    """Stored episodes, or media of them, are no longer in the object store.

    Cure: let the process that stored the episodes run until they have been loaded.
    """

    def __init__(self, num_episodes: int, reason: str) -> None:
        self.num_episodes = num_episodes
        self.reason = reason
        super().__init__(
            f"{num_episodes} stored episodes, or media of them, are no longer in the object store ({reason}); the "
            "process that stored them must run until they have been loaded"
        )


class RayServerStartError(RolloutsError):
    """A server of an engine did not start on Ray. `server` is the name of its actor.

    Cure: read the log of the actor; usually the command, the model's directory or the resources of the node are the
    reason.
    """

    def __init__(self, server: str, reason: str) -> None:
        self.server = server
        self.reason = reason
        super().__init__(f"server {server:.80} did not start: {reason}")


_ADDRESS: Final = "RAY_ADDRESS"
_REACHABLE: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def connect(address: str | None = None) -> None:
    """Connect this process to a Ray cluster; where it is connected, do nothing.

    `address` is that of `ray.init`; without one it is that of the environment variable RAY_ADDRESS, which
    `ray job submit` sets. Where there is none either, a cluster of this machine alone is started: on the loopback
    address, without a dashboard and without usage reports. It ends with this process. Raises `RayConnectionError`.
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get(_ADDRESS)
    try:
        if address:
            ray.init(address=address, logging_level="WARNING")
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            with _on_loopback():
                ray.init(address="local", logging_level="WARNING", include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        cure = "start it (`ray start --head`), or correct the address" if address else "see the message above"
        raise RayConnectionError(address or "", str(error) or type(error).__name__, cure) from error


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
    """Raise `RayConnectionError` unless this process is connected: Ray would start a cluster with open ports."""
    if not ray.is_initialized():
        cure = 'call rollouts.ray.connect(), or ray.init(address="auto"), first'
        raise RayConnectionError("", "this process is not connected to a cluster", cure)
