"""Errors of the demonstration."""

from __future__ import annotations

from rollouts.errors import RolloutsError


class TrainerDiedError(RolloutsError):
    """The training process ended or failed; its traceback is in the message.

    Cure: read the traceback in the text; if the process was killed, free memory (the demonstration needs 3 GB).
    """
