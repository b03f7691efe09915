"""Errors of observability."""

from __future__ import annotations

from rollouts.errors import RolloutsError


class EndpointError(RolloutsError):
    """An HTTP endpoint cannot listen on its address: the port is in use, needs privileges, or the host is not local.

    Cure: pass another port, or `port=0` for any that is free.
    """

    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        super().__init__(
            f"the metrics endpoint cannot listen on {host}:{port}: {reason}; pass another port, or port=0 for any "
            "that is free"
        )
