"""A turn is recorded without giving up the interpreter's lock, however long its prompt is.

numpy gives up the lock in operations on more than 500 values. While the threads of a renderer compute in Python, the
event loop then waits for it again, for 5 ms or more each time, and every episode waits with it.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from renderers import RenderedTokens
from rollouts import Completion, FinishReason, WeightSpan
from rollouts.trajectory.tree import Trajectory

SAMPLED = 500  # longer log-probabilities are checked by numpy: there is no other way that is as fast


@contextmanager
def counting_thread() -> Iterator[Callable[[], int]]:
    """A thread that computes whenever it has the interpreter's lock; yields a function that returns how far it is.

    It asks for the lock, but does not receive it from code that does not give it up: the interval after which Python
    takes it away is longer than the test, and the collector is off, because the finalizers of what other tests left
    (open files, for one) give up the lock.
    """
    count, begun, ended = 0, threading.Event(), threading.Event()

    def compute() -> None:
        nonlocal count
        while not ended.is_set():
            count += 1
            begun.set()
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=compute, daemon=True)
    gc.disable()
    sys.setswitchinterval(100)  # before the thread begins to wait for the lock, which is when it reads the interval
    try:
        thread.start()
        assert begun.wait(30)
        yield lambda: count
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
        ended.set()
        thread.join(30)


def gives_up_lock(call: Callable[[], object]) -> bool:
    """Whether another thread computed during any of 50 calls."""
    call()  # what only the first call loads
    with counting_thread() as count:
        for _ in range(50):
            before = count()
            call()
            if count() != before:
                return True
    return False


def completion(length: int) -> Completion:
    ids, logprobs = np.arange(length, dtype=np.int32), np.full(length, -0.5, np.float32)
    return Completion(0, ids, logprobs, FinishReason.STOP, length - 1, (WeightSpan("0", 0, length),))


def rendered(ids: list[int]) -> RenderedTokens:
    return RenderedTokens(ids, message_indices=[0] * len(ids), message_roles=["user"], is_content=[True] * len(ids))


@pytest.mark.slow
def test_the_detector_notices_an_operation_that_gives_up_the_lock() -> None:
    many = np.arange(10_000_000)
    assert gives_up_lock(lambda: many + 1)


@pytest.mark.parametrize("length", [600, 5000, 20_000])
def test_turns_are_recorded_without_giving_up_the_lock(length: int) -> None:
    first = rendered(list(range(length)))
    sampled = completion(SAMPLED)
    second = rendered([*first.token_ids, *sampled.token_ids.tolist(), *range(length)])
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}

    def two_turns() -> None:
        trajectory = Trajectory("episode")
        node = trajectory.add_turn(first, sampled, answer, messages=[question])
        trajectory.add_turn(second, sampled, answer, messages=[question], after=node)

    assert not gives_up_lock(two_turns)
