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


class SinkStartError(RolloutsError):
    """A service that metrics are written to refuses them at the start. `service` is its name.

    Cure: for Weights & Biases run `wandb login`, or choose the mode offline.
    """

    def __init__(self, service: str, reason: str, cure: str) -> None:
        self.service = service
        self.reason = reason
        super().__init__(f"{service} cannot be started: {reason}; {cure}")


class TrainingLogError(RolloutsError):
    """A record of a file of mismatches is none of `TrainingLog`. `path` is the file, `record` the number.

    Cure: delete the file if another program wrote it.
    """

    def __init__(self, path: str, record: int, reason: str) -> None:
        self.path = path
        self.record = record
        self.reason = reason
        super().__init__(f"{path}, record {record}: {reason}; delete the file if another program wrote it")
