"""Calling code of others: whatever it raises becomes an error of ours, and a cancellation stays one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollouts.errors import RolloutsError


@contextmanager
def failures_as(
    error_of: Callable[[BaseException], RolloutsError], *, passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise `error_of(exception)` in place of an exception from the block; those of the types `passing` pass.

    A `CancelledError` passes if this task is being cancelled. Otherwise the code in the block waited for something that
    was cancelled, which is a failure like any other. `KeyboardInterrupt` and `SystemExit` pass.
    """
    try:
        yield
    except passing:
        raise
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        raise error_of(error) from error
    except Exception as error:  # an environment, engine or renderer of a user may raise anything
        raise error_of(error) from error


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
