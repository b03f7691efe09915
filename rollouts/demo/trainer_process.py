"""The process that trains, and the pipe to it. Light to import: torch is loaded in the child, beside the parent's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rollouts.demo.errors import TrainerDiedError
from rollouts.demo.recipe import Recipe
from transport import decode, encode, wire_type

if TYPE_CHECKING:
    from rollouts.demo.messages import Learn, Learned, WarmStart


@wire_type("rollouts.demo.Failed")
@dataclass(frozen=True, slots=True)
class Failed:
    """What the training process says instead of a reply when it cannot go on."""

    reason: str


class TrainerProcess:
    """The training process behind a pipe that carries bytes of `transport.encode` and nothing else."""

    def __init__(self, model_directory: Path, recipe: Recipe, seed: int) -> None:
        self.threads = min(2, os.cpu_count() or 1)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, str(model_directory), recipe, seed, self.threads), daemon=True
        )
        with _interrupts_held_back():
            self._process.start()
        theirs.close()

    async def ask(self, request: WarmStart | Learn) -> tuple[Learned, int]:
        """The trainer's reply, and how many bytes the request took."""
        message = encode(request)
        return await asyncio.to_thread(self._exchange, message), len(message)

    def _exchange(self, message: bytes) -> Learned:
        try:
            self._connection.send_bytes(message)
            reply = decode(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise TrainerDiedError(f"the training process ended with exit code {self._process.exitcode}") from error
        if isinstance(reply, Failed):
            raise TrainerDiedError(reply.reason)
        learned: Learned = reply
        return learned

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process: it leaves when its pipe closes, or is killed."""
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A process that is started here never gets Ctrl-C: it would print a traceback while it imports.

    The parent gets one that comes meanwhile afterwards: interrupted in the middle, it would leave a child that waits
    for what it is to run. Blocking the signal is not enough for that, because a thread of another library may take it,
    and Python then interrupts the main thread.
    """
    held_back: list[int] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        handler = signal.signal(signal.SIGINT, lambda number, _: held_back.append(number))
    try:
        resource_tracker.ensure_running()  # starting it later would lift the block
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
            if held_back:
                signal.raise_signal(signal.SIGINT)


def collect_garbage_rarely() -> None:
    """Leave what is loaded so far out of garbage collection, and collect less often.

    Episodes make objects by the hundred thousand; scanning those of torch and transformers again each time would cost
    as much as sampling does.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _serve(connection: Connection, model_directory: str, recipe: Recipe, seed: int, threads: int) -> None:
    """Answer requests until the other end is closed. Ctrl-C is the other process's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    from transformers.utils import logging as transformers_logging

    from rollouts.demo.trainer import Trainer

    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    collect_garbage_rarely()
    trainer: Trainer | None = None
    while True:
        try:
            request = decode(connection.recv_bytes())
        except EOFError:
            return
        try:
            # Built on the first request: by then the parent has written the model.
            trainer = trainer or Trainer(Path(model_directory), recipe, seed)
            reply = trainer.answer(request)
        except BaseException:
            connection.send_bytes(encode(Failed(traceback.format_exc())))
            raise
        connection.send_bytes(encode(reply))
