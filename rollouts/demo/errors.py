"""Errors of the demonstration."""

from __future__ import annotations

from rollouts.errors import RolloutsError


class TrainerDiedError(RolloutsError):
    """The training process ended or failed; its traceback is in the message."""
