"""Errors of the scripted engine."""

from __future__ import annotations

from rollouts.errors import EngineError


class ScriptError(EngineError):
    """A script has no answer for a request, or one that cannot be given."""
