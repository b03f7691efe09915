"""Errors of `rollouts init`."""

from __future__ import annotations

from rollouts.cli.errors import CommandFileError


class ProjectFileError(CommandFileError):
    """A file of a new project exists, or cannot be written.

    Cure: name another directory, or one that this user may write to.
    """
