"""Errors of `rollouts run`."""

from __future__ import annotations

from rollouts.errors import RolloutsError


class DryRunError(RolloutsError):
    """The first episode of a dry run has no prompt. `task_id` is its task, `reason` how it ended.

    Cure: correct the environment or the task; the reason is that of the episode.
    """

    def __init__(self, task_id: str, reason: str) -> None:
        self.task_id = task_id
        self.reason = reason
        super().__init__(f"task {task_id:.80} has no first prompt: {reason}")
