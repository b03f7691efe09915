"""Errors of the readers of JSON and of literals."""

from __future__ import annotations

from renderers.errors import RendererError


class LiteralError(RendererError, ValueError):
    """The text is not a value of the language."""


class InvalidJsonError(RendererError, ValueError):
    """The text is not JSON, or its value cannot be written as JSON again."""
