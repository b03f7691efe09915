"""Conversion of exceptions from user code into errors of `rollouts`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollouts.errors import RolloutsError


@contextmanager
def wrap_exceptions(
    make_error: Callable[[BaseException], RolloutsError], *, unchanged: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Replace an exception from the block by `make_error(exception)`; the types `unchanged` are not replaced.

    A `CancelledError` is not replaced if the current task is being cancelled. Otherwise the code in the block waited
    for something that was cancelled, which is a failure like any other. `KeyboardInterrupt` and `SystemExit` are not
    replaced.
    """
    try:
        yield
    except unchanged:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling() > 0:
            raise
        raise make_error(error) from error
    except Exception as error:  # an environment, engine or renderer of a user may raise anything
        raise make_error(error) from error
