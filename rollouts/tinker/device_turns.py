"""Who computes when on the device of a trainer: training steps, and the batches of the sampler."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

#: How long a batch has the device before another one has it.
SLICE_SECONDS: Final = 0.05


class DeviceTurns(AbstractContextManager[None]):
    """The lock of a batch, which has the device inside the block: batches get it in the order in which they ask for it.

    After each token a batch asks `is_wanted`; if so, it leaves the block, and enters it again. Another batch
    then has its turn, or a training step, once sampling has had the device for as long as the step before
    took. `lock` is held by whatever computes.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._changed = threading.Condition()
        self._batches: deque[int] = deque()  # their threads; the first one computes, or waits for a training step
        self._steps = 0  # training steps that run or wait
        self._ended = 0
        self._since = 0.0  # when the first batch got the device
        self._until = 0.0  # until when training steps wait

    @contextmanager
    def training(self) -> Iterator[None]:
        """A training step waits for the lock inside the block, and runs."""
        with self._changed:
            self._steps += 1
        try:
            yield
        finally:
            with self._changed:
                self._steps -= 1
                self._ended += 1
                self._changed.notify_all()

    def __enter__(self) -> None:
        own = threading.get_ident()
        with self._changed:
            self._batches.append(own)
            self._changed.wait_for(lambda: self._batches[0] == own)
            asked, ended = time.monotonic(), self._ended
            if asked >= self._until:
                self._changed.wait_for(lambda: not self._steps or self._ended != ended)
        self._lock.acquire()
        self._since = time.monotonic()
        self._until = max(self._until, self._since + max(SLICE_SECONDS, self._since - asked))

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        with self._changed:
            self._batches.popleft()
            self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Whether something else has its turn now."""
        now = time.monotonic()
        another = len(self._batches) > 1 and now >= self._since + SLICE_SECONDS
        return another or (self._steps > 0 and now >= self._until)
