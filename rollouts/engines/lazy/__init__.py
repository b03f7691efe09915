"""An engine that is started with its first request: a function that makes it, or the command of a server."""

from rollouts.engines.lazy.engine import LazyEngine

__all__ = ["LazyEngine"]
