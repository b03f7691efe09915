"""Connecting a program to Ray."""

from __future__ import annotations

import os

import ray

from rollouts.ray.errors import RayConnectionError

_ADDRESS = "RAY_ADDRESS"


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
            ray.init(address="local", logging_level="WARNING", include_dashboard=False, _node_ip_address="127.0.0.1")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        cure = "start it (`ray start --head`), or correct the address" if address else "see the message above"
        raise RayConnectionError(address or "", str(error) or type(error).__name__, cure) from error


def require_connection() -> None:
    """Raise `RayConnectionError` unless this process is connected: Ray would start a cluster with open ports."""
    if not ray.is_initialized():
        cure = 'call rollouts.ray.connect(), or ray.init(address="auto"), first'
        raise RayConnectionError("", "this process is not connected to a cluster", cure)
