"""A clean state in forked processes for objects with locks and with work that is pending.

A forked process has one thread. Locks that other threads held when it was forked are never released there, and work
that was pending in its parent never ends there.
"""

import functools
import os
import threading
from typing import Protocol
from weakref import WeakSet


class ForkReset(Protocol):
    """An object that can return to a state without held locks and pending work."""

    def reset_after_fork(self) -> None:
        """Called in the forked process, before any other code of it, in its only thread."""


_objects: WeakSet[ForkReset] = WeakSet()


def register_fork_reset(target: ForkReset) -> None:
    """Call `target.reset_after_fork()` in each process forked from now on, while `target` exists."""
    _register_handler()
    _objects.add(target)


class ProcessLock:
    """A lock for `with` that is free at the start of each forked process."""

    def __init__(self) -> None:
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        if self._lock.locked():  # it is not where the thread that holds it has forked
            self._lock.release()


@functools.cache
def _register_handler() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_reset_all)


def _reset_all() -> None:
    # A copy: a weak set may not change while it is iterated over.
    for each in list(_objects):
        each.reset_after_fork()
