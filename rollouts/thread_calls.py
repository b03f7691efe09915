"""Calls of functions on threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any


def result_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread. A future cannot hold a StopIteration: the coroutine would wait forever."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration") from error


async def call_on_own_thread(function: Callable[[], Any]) -> Any:
    """Call a function on a new thread and return its result.

    A thread of its own, because a function that never returns would keep a thread of a pool for ever, and with enough
    of them every other call. The thread of a cancelled call runs to its end; it does not keep the program from exiting.
    """
    future: Future[Any] = Future()
    context = copy_context()

    def run() -> None:
        try:
            result = context.run(result_of, function)
        except BaseException as error:  # noqa: BLE001  raised again where the result is awaited
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(result)

    threading.Thread(target=run, name="own-thread", daemon=True).start()
    return await asyncio.wrap_future(future)
