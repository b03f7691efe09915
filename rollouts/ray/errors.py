"""Errors of episodes on a Ray cluster."""

from __future__ import annotations

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
