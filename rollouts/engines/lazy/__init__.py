"""A lazy engine starts with its first request: it calls a function, or runs the command of a server."""

from rollouts.engines.lazy.engine import LazyEngine

__all__ = ["LazyEngine"]
