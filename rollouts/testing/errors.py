"""Errors of the scripted engine."""

from __future__ import annotations

from rollouts.errors import EngineError


class ScriptError(EngineError):
    """A script has no entry for a request, or one that cannot become a completion."""
