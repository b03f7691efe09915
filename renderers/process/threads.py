"""Threads for calls that may hang, and the number of cores that a process may use."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakSet, finalize

from renderers.process.fork_reset import register_fork_reset


def available_cores() -> int:
    """The cores that the process may run on (`taskset`, cpusets); all where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def on_event_loop() -> bool:
    """Whether an event loop runs on this thread, which then must not wait for a network."""
    return asyncio._get_running_loop() is not None


P = ParamSpec("P")
T = TypeVar("T")

#: How long the process waits at its end for calls that run, so that short ones are not stopped in the middle.
END_SECONDS: Final = 0.5


class DaemonThreads(Executor):
    """An executor with up to `max_threads` threads, made when they are needed, that do not keep the process alive.

    For calls that may take for ever, such as a method of an environment or the fetching of an image.
    `concurrent.futures.ThreadPoolExecutor` waits at the end of the process for every call that has begun, and
    `asyncio.run` does so for calls of `asyncio.to_thread`: one call that hangs would keep a program alive after Ctrl-C.

    At the end of the process, calls that run have half a second; then they are abandoned. A call that is cancelled
    while it runs no longer counts as one of the `max_threads`: calls that hang do not use up the threads.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._workers = _Workers(max_threads, name)
        # Not at exit, where calls that run have their own time (`_wait_for_calls`).
        finalize(self, self._workers.close).atexit = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call the function on a thread, after earlier calls. Raises RuntimeError after `shutdown`."""
        call: _Call[T] = _Call(functools.partial(function, *args, **kwargs))
        self._workers.add(call)
        return call

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function on a thread, with the context variables of the caller, and wait for the result.

        A call that is cancelled before a thread begins it never runs; one that is cancelled later ends on its thread,
        in whose place another call runs. Raises RuntimeError after `shutdown`, and `CancelledError` if `shutdown`
        cancelled it.
        """
        return await self.begin(function, *args, **kwargs)

    def begin(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        """`run`, which begins at once and is awaited later. Raises RuntimeError after `shutdown`."""
        # A thread has context variables of its own; the call gets those of its caller.
        call: _Call[T] = _Call(functools.partial(copy_context().run, function, *args, **kwargs))
        self._workers.add(call)
        return self._result(call)

    async def _result(self, call: _Call[T]) -> T:
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            self._workers.abandon(call)
            raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls, and return when all earlier ones have ended, except for abandoned ones.

        `wait` False: return at once. `cancel_futures`: cancel the calls that have not begun.
        """
        threads = self._workers.close(cancel_futures)
        if wait:
            for thread in threads:
                thread.join()


class _Call(Future[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self.function = function
        self.is_abandoned = False

    def execute(self) -> None:
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as error:  # noqa: BLE001  the caller that waits for the result raises it
            self.set_exception(error)
        else:
            self.set_result(result)


class _Workers:
    """The threads of one executor. They refer to this object, so that the executor can be freed."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._closed = False
        self.reset_after_fork()
        register_fork_reset(self)
        _register_end()
        _all_workers.add(self)

    def reset_after_fork(self) -> None:
        """A forked process has none of the threads, and their calls belong to its parent."""
        self._process = os.getpid()
        self._changed = threading.Condition()  # its lock is reentrant: `close` may be called by the garbage collector
        self._waiting: deque[_Call[Any]] = deque()
        self._threads: set[threading.Thread] = set()  # without those of abandoned calls
        self._idle = 0
        self._running: dict[_Call[Any], threading.Thread] = {}

    def add(self, call: _Call[Any]) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("cannot submit a call after shutdown")
            self._waiting.append(call)
            self._changed.notify()
            self._start_thread()

    def abandon(self, call: _Call[Any]) -> None:
        with self._changed:
            thread = self._running.get(call)
            if thread is not None and not call.is_abandoned:
                call.is_abandoned = True
                self._threads.discard(thread)
                self._start_thread()

    def close(self, cancel_waiting: bool = False) -> list[threading.Thread]:
        """Let the threads end when no call waits; return them."""
        if self._process != os.getpid():  # forked, and not reset yet: there is no thread, and the lock may be held
            self._closed = True
            return []
        with self._changed:
            self._closed = True
            if cancel_waiting:
                waiting, self._waiting = self._waiting, deque()
                for call in waiting:
                    call.cancel()
            self._changed.notify_all()
            return list(self._threads)

    def wait_until_idle(self, deadline: float) -> None:
        """Wait until no call runs, or until `deadline`, in seconds of `time.monotonic`."""
        while self._running and time.monotonic() < deadline:
            time.sleep(0.01)

    def _start_thread(self) -> None:
        """Start a thread if more calls wait than threads are idle."""
        # An idle thread that was woken for an earlier call still counts as idle: it takes that one.
        if len(self._waiting) > self._idle and len(self._threads) < self._max_threads:
            thread = threading.Thread(target=self._execute_calls, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def _execute_calls(self) -> None:
        thread = threading.current_thread()
        while (call := self._next_call(thread)) is not None:
            call.execute()
            with self._changed:
                self._running.pop(call, None)
                if call.is_abandoned:
                    return  # another thread has its place

    def _next_call(self, thread: threading.Thread) -> _Call[Any] | None:
        with self._changed:
            self._idle += 1
            while not self._waiting and not self._closed:
                self._changed.wait()
            self._idle -= 1
            if not self._waiting:
                self._threads.discard(thread)
                return None
            call = self._waiting.popleft()
            self._running[call] = thread
            return call


_all_workers: WeakSet[_Workers] = WeakSet()


@functools.cache
def _register_end() -> None:
    atexit.register(_wait_for_calls)


def _wait_for_calls() -> None:
    deadline = time.monotonic() + END_SECONDS
    for workers in list(_all_workers):
        workers.wait_until_idle(deadline)
