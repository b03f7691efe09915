"""Errors of workers."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.errors import RolloutsError


class WorkerGoneError(RolloutsError):
    """A worker ended, or cannot be reached, while it ran an episode. The episode runs again on another worker.

    `worker` is its name.

    Cure: none is needed: the episode runs again on another worker. If it happens often, read the worker's log.
    """

    def __init__(self, worker: str, reason: str) -> None:
        self.worker = worker
        self.reason = reason
        super().__init__(f"worker {worker:.80}: {reason}")


class WorkerLostError(RolloutsError):
    """An episode was given up because each worker that ran it was lost. `losses` has a line for each of them.

    Cure: read the logs of the workers; the environment may end its process, or use more memory than there is.
    """

    def __init__(self, episode_id: str, losses: Sequence[str]) -> None:
        self.episode_id = episode_id
        self.losses = tuple(losses)
        super().__init__(
            f"episode {episode_id:.80} lost {len(self.losses)} workers ({'; '.join(self.losses)}) and is not run "
            "again; see the logs of the workers: its environment may end its process, or use more memory than there is"
        )


class UnreadableOutcomeError(RolloutsError):
    """What a worker sent as the outcome of an episode cannot be decoded, or is the outcome of another episode.

    Cure: install the same version of mmrollouts and of the environment on both sides.
    """

    def __init__(self, worker: str, reason: str) -> None:
        self.worker = worker
        self.reason = reason
        super().__init__(f"worker {worker:.80} sent an outcome that cannot be used: {reason}")


class WorkersClosedError(RolloutsError):
    """The workers of a runner were closed.

    Cure: make new workers, and pass them to a new `Runner`.
    """

    def __init__(self) -> None:
        super().__init__("these workers are closed; make new ones, and pass them to a new Runner")
