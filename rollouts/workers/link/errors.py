"""Errors of workers that are linked to their orchestrator."""

from __future__ import annotations

from rollouts.errors import RolloutsError


class WorkersNotStartedError(RolloutsError):
    """`LinkWorkers` are used outside of their `async with` block, in which they receive.

    Cure: use the workers inside `async with LinkWorkers(...)`.
    """

    def __init__(self) -> None:
        super().__init__("these LinkWorkers receive nothing yet; write `async with LinkWorkers(...) as workers:`")


class OrchestratorLostError(RolloutsError):
    """A worker could not reach its orchestrator for as long as it may wait. `seconds` is how long it has tried.

    Cure: start the orchestrator, or correct the address, and check that both sides have the keys of one set.
    """

    def __init__(self, address: str, seconds: float, reason: str) -> None:
        self.address = address
        self.seconds = seconds
        self.reason = reason
        super().__init__(
            f"no orchestrator at {address} for {seconds:.0f} s ({reason.removesuffix('.')}); start it, or correct the "
            "address, and check that both sides have the keys of one set"
        )


class KeyFileError(RolloutsError, ValueError):
    """A file of keys cannot be used. Its text has none of the keys.

    Cure: make a set of key files with `rollouts keys DIRECTORY`.
    """

    def __init__(self, path: object, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}; make a set of key files with `rollouts keys DIRECTORY`")
