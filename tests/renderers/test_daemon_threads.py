"""Threads that do not keep the process alive: order, limits, abandoned calls, and the end of the process."""

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading

import pytest

from renderers.process.threads import DaemonThreads

NAME = contextvars.ContextVar("NAME", default="")


async def test_a_cancelled_call_that_hangs_gives_its_thread_to_others() -> None:
    threads, release, started = DaemonThreads(1, "test"), threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        release.wait()

    for _ in range(3):
        started.clear()
        hanging = asyncio.create_task(threads.run(hang))
        await asyncio.to_thread(started.wait)
        next_call = asyncio.create_task(threads.run(int, "7"))
        await asyncio.sleep(0)
        hanging.cancel()
        assert await next_call == 7
        with pytest.raises(asyncio.CancelledError):
            await hanging
    threads.shutdown()  # does not wait for abandoned calls
    release.set()


async def test_a_call_has_the_context_variables_of_its_caller() -> None:
    NAME.set("caller")
    assert await DaemonThreads(1, "test").run(NAME.get) == "caller"


def test_after_shutdown_waiting_calls_are_made_and_new_ones_refused() -> None:
    threads, order = DaemonThreads(1, "test"), []
    release = threading.Event()
    threads.submit(release.wait)
    waiting = [threads.submit(order.append, n) for n in range(3)]
    threads.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(int)
    assert order == []  # the one thread is taken
    release.set()
    threads.shutdown()
    assert order == [0, 1, 2]
    assert all(call.done() for call in waiting)


@pytest.mark.slow
def test_the_threads_of_a_freed_executor_end() -> None:
    threads = DaemonThreads(2, "freed-executor")
    threads.submit(int).result()
    (thread,) = (each for each in threading.enumerate() if each.name == "freed-executor")
    del threads
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


PROGRAM = """
import sys, threading, time
from renderers.process.threads import DaemonThreads
threads = DaemonThreads(2, "test")
began = threading.Event()
def short():
    began.set()
    time.sleep(0.2)
    print("short call ended", flush=True)
def hanging():
    began.wait()
    time.sleep(3600)
threads.submit(short)
threads.submit(hanging)
began.wait()
"""


@pytest.mark.slow
def test_a_hanging_call_does_not_keep_the_process_alive_and_a_short_one_is_completed() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "short call ended\n", "")
