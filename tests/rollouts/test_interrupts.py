"""Ctrl-C inside code that must not be interrupted arrives after it."""

import asyncio
import signal
import threading

import pytest

from rollouts.terminal.interrupts import defer_interrupts, run_with_deadline


def interrupt_a_block(finished: list[bool], error: Exception | None = None) -> None:
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        finished.append(True)
        if error:
            raise error


def test_an_error_inside_the_block_does_not_lose_the_interrupt() -> None:
    error = ValueError()
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt_a_block([], error)
    assert caught.value.__context__ is error


def test_a_thread_other_than_the_main_one_runs_the_block_without_a_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    handlers: list[object] = []

    def run() -> None:
        with defer_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_a_run_that_is_interrupted_inside_the_block_ends_in_its_own_time() -> None:
    finished: list[bool] = []

    async def main() -> None:
        interrupt_a_block(finished)
        await asyncio.Event().wait()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(KeyboardInterrupt):
            run_with_deadline(main(), 10**6, "stopped at once")
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert finished


def test_a_run_that_nohup_started_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def main() -> str:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0)
        return "finished"

    try:
        assert run_with_deadline(main(), 10**6, "stopped at once") == "finished"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
