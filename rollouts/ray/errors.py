"""Errors of episodes on a Ray cluster."""

from __future__ import annotations

from rollouts.errors import RolloutsError


class RayConnectionError(RolloutsError):
    """This process cannot use a Ray cluster. `address` is the address of the cluster, empty where none was given."""

    def __init__(self, address: str, reason: str, cure: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(f"{f'the Ray cluster at {address}' if address else 'Ray'}: {reason}; {cure}")


class RayWorkerStartError(RolloutsError):
    """Workers on Ray do not start. `worker` is the name of the one that failed last, `reason` what it reports."""

    def __init__(self, worker: str, reason: str, cure: str) -> None:
        self.worker = worker
        self.reason = reason
        super().__init__(f"worker {worker:.80} did not start: {reason}; {cure}")


class RayJobError(RolloutsError):
    """A worker could not run an episode at all, as when it cannot decode the task. `worker` is its name."""

    def __init__(self, worker: str, reason: str) -> None:
        self.worker = worker
        self.reason = reason
        super().__init__(f"worker {worker:.80} could not run the episode: {reason}")


class StoredEpisodesLostError(RolloutsError):
    """Stored episodes, or media of them, are no longer in the object store."""

    def __init__(self, num_episodes: int, reason: str) -> None:
        self.num_episodes = num_episodes
        self.reason = reason
        super().__init__(
            f"{num_episodes} stored episodes, or media of them, are no longer in the object store ({reason}); the "
            "process that stored them must run until they have been loaded"
        )


class RayServerStartError(RolloutsError):
    """A server of an engine did not start on Ray. `server` is the name of its actor."""

    def __init__(self, server: str, reason: str) -> None:
        self.server = server
        self.reason = reason
        super().__init__(f"server {server:.80} did not start: {reason}")
