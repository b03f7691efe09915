"""Ctrl-C inside code that must not be interrupted arrives after it."""

from __future__ import annotations

import signal
import threading

import pytest

from rollouts.terminal.interrupts import defer_interrupts


def test_an_interrupt_inside_the_block_is_raised_after_its_last_statement() -> None:
    finished = False
    with pytest.raises(KeyboardInterrupt), defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        finished = True
    assert finished


def test_an_interrupt_outside_the_block_is_raised_at_once_and_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with defer_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_error_inside_the_block_does_not_lose_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)


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
