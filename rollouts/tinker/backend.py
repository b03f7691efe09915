"""What the users of a server share: the trainer, which computes one call at a time, the sampler, and the limits."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rollouts.errors import short_repr
from rollouts.serve.errors import RequestError
from rollouts.tinker.inputs import InputReader
from rollouts.tinker.sampler import Sampler
from rollouts.training.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much clients may hold.

    `pending`: sampling requests whose results were not fetched, of all sessions of a user; one session may
    have half of what the others leave. `samples`: of one request; `session_seconds`: a session that sends
    nothing for as long ends.
    """

    sessions: int = 64
    models: int = 32
    rank: int = 128
    pending: int = 8192
    samples: int = 1024
    session_seconds: float = 900.0


class Backend:
    """What the users of a server share: a trainer, a sampler, and the names of the model that they have."""

    def __init__(
        self,
        trainer: Trainer,
        sampler: Sampler,
        reader: InputReader,
        names: Sequence[str],
        *,
        limits: Limits = Limits(),
        check_mismatch: bool = False,
    ) -> None:
        self.trainer = trainer
        self.sampler = sampler
        self.reader = reader
        self.names = tuple(names)
        self.limits = limits
        self.check_mismatch = check_mismatch
        # The trainer takes one call at a time; they must not wait in threads that reading needs.
        self._training = ThreadPoolExecutor(1, "tinker-training")

    async def train(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """The result of a call of the trainer, while the sampler sleeps where both have one device.

        Who is cancelled meanwhile has it, too: the call runs to its end, and a save that was written is a
        checkpoint.
        """

        async def awaited() -> T:
            async with self.sampler.asleep():
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._training, lambda: call(*args, **options))

        called = asyncio.create_task(awaited())
        while not called.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([called])
        return called.result()

    def check_name(self, name: str) -> None:
        """Raise `RequestError` (400) for the name of a base model that is not served."""
        if name not in self.names:
            raise RequestError(400, f"base_model {short_repr(name)} is not served; there is {', '.join(self.names)}")

    async def close(self) -> None:
        await self.sampler.close()
        await asyncio.to_thread(self._training.shutdown)
