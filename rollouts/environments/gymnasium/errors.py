"""Errors of environments of Gymnasium."""

from __future__ import annotations

from rollouts.errors import RolloutsError


class GymnasiumError(RolloutsError):
    """An environment of Gymnasium is not one that a model can play. `environment` names it.

    Cure: call `reset` before `step`; for action spaces other than Discrete and Box pass `instructions` and
    `parse_action`.
    """

    def __init__(self, environment: str, reason: str) -> None:
        self.environment = environment
        self.reason = reason
        super().__init__(f"{environment} {reason}")


class InvalidActionError(RolloutsError, ValueError):
    """A completion does not contain an action. `reason` says why, in words for the model.

    Cure: none is needed: the model receives the reason, and the episode continues or ends as the environment was told.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)
