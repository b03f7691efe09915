"""What the demonstration does before it imports torch: its output directory, and the process of the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rollouts.demo.recipe import Recipe
from rollouts.errors import RolloutsError
from rollouts.observability.training_log import MISMATCH_FILE, TRAINING_FILE
from rollouts.terminal.interrupts import defer_interrupts
from transport import RecordReader, decode, encode, wire_type
from transport.records.file_lock import locked

if TYPE_CHECKING:
    from rollouts.demo.task import Learn, Learned, WarmStart
    from rollouts.demo.trainer import Trainer


def episodes_file(out: Path) -> Path:
    return out / "trajectories.mmr"


def prepare_output(out: Path) -> None:
    """Create the directory. Raises `OSError`, and `FileLockedError` if another run writes there."""
    out.mkdir(parents=True, exist_ok=True)
    if episodes_file(out).exists():
        with locked(episodes_file(out)):
            pass


def remove_earlier_episodes(out: Path) -> None:
    """Delete the episodes and the training log of an earlier run. Raises the errors of `prepare_output`."""
    for records in (episodes_file(out), out / MISMATCH_FILE):
        if records.exists():
            with locked(records):
                records.unlink()
    (out / TRAINING_FILE).unlink(missing_ok=True)


def has_episodes(out: Path, started_at: float) -> bool:
    """Whether this run (started at `started_at`, epoch) wrote episodes: the file is made before the first of them."""
    episodes = episodes_file(out)
    if not episodes.exists() or episodes.stat().st_mtime < started_at:
        return False
    with RecordReader(episodes) as reader:
        return len(reader) > 0


# The training process and the pipe to it.


@wire_type("rollouts.demo.Failed")
@dataclass(frozen=True, slots=True)
class Failed:
    """The response of the training process when it fails."""

    reason: str


class TrainerProcess:
    """The training process. All messages on its pipe are bytes of `transport.encode`."""

    def __init__(self, model_directory: Path, recipe: Recipe, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(model_directory), recipe, seed), daemon=True)
        with _sigint_blocked():
            self._process.start()
        theirs.close()

    async def request(self, request: WarmStart | Learn) -> tuple[Learned, int]:
        """Return the trainer's response, and the size of the request in bytes."""
        message = encode(request)
        return await asyncio.to_thread(self._exchange, message), len(message)

    def _exchange(self, message: bytes) -> Learned:
        try:
            self._connection.send_bytes(message)
            reply = decode(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise RolloutsError(f"the training process ended with exit code {self._process.exitcode}") from error
        if isinstance(reply, Failed):
            raise RolloutsError(reply.reason)
        learned: Learned = reply
        return learned

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process: it exits when its pipe closes; after 5 s it is killed."""
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Start a process with SIGINT blocked in it; otherwise Ctrl-C during its imports prints a traceback.

    Blocking the signal does not defer it in the parent, because a thread of another library may receive it,
    and Python then interrupts the main thread: so `defer_interrupts`.
    """
    with defer_interrupts():
        resource_tracker.ensure_running()  # a later start would unblock the signal
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def collect_garbage_rarely() -> None:
    """Exclude the objects that exist now from garbage collection, and collect less often.

    Episodes create several hundred thousand objects; scanning those of torch and transformers in each
    collection costs as much as sampling.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _serve(connection: Connection, model_directory: str, recipe: Recipe, seed: int) -> None:
    """Handle requests until the pipe closes. Only the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    from rollouts.demo.trainer import Trainer

    torch.set_num_threads(1)  # on busy cores a tiny model is many times slower with two
    collect_garbage_rarely()
    trainer: Trainer | None = None
    while True:
        try:
            request = decode(connection.recv_bytes())
        except EOFError:
            return
        try:
            # Created at the first request: the parent has written the model by then.
            trainer = trainer or Trainer(Path(model_directory), recipe, seed)
            reply = trainer.handle(request)
        except BaseException:
            connection.send_bytes(encode(Failed(traceback.format_exc())))
            raise
        connection.send_bytes(encode(reply))
