"""What earlier calls have done to a server, where the server does not report it, and the calls that this rules out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rollouts.engines.vllm.control.routes import ControlRoutes
from rollouts.errors import UnsafeControlError


class ServerState:
    """The state of one server as the calls of this process left it. Forgotten when the server is another process.

    `loaded_directory` holds the weights that were loaded last, unless a trainer has sent others since
    (`was_transferred`); `unusable_weights` is the reason why the server must not
    run with the weights that it has, None where it may.
    """

    def __init__(self, routes: ControlRoutes) -> None:
        self._routes = routes
        self._lock = threading.Lock()
        self._running_update: str | None = None  # the name of the call
        self._process_start_time: float | None = None
        self._forget()

    def _forget(self) -> None:
        self.loaded_directory: str | None = None
        self.was_transferred = False
        self.unusable_weights: str | None = None
        self.record_sleep(0)

    def record_sleep(self, level: int) -> None:
        """The server was put to sleep with this level."""
        self._last_sleep_level = level
        # Since then:
        self._weights_have_memory = False
        self._weights_loaded = False

    def record_wake_up(self, *, weights: bool, awake: bool) -> None:
        """Memory is back: that of the weights, and where `awake` all of it."""
        self._weights_have_memory |= weights
        if awake:
            self._last_sleep_level = 0

    def record_load(self, directory: str) -> None:
        """All workers have loaded the weights in `directory`."""
        self.unusable_weights = None
        self.loaded_directory = directory
        self.was_transferred = False
        self._weights_loaded = True

    def record_transfer(self) -> None:
        """All workers have received weights from a trainer."""
        self.unusable_weights = self.loaded_directory = None
        self.was_transferred = True
        self._weights_loaded = True

    async def sleep_level(self) -> int:
        """The level that the server reports, else that of the last call. Raises `CapabilityError`."""
        await self._routes.require("/sleep")
        level = (await self._routes.metrics()).sleep_level
        return self._last_sleep_level if level is None else level

    async def forget_if_restarted(self) -> None:
        """Forget everything if the server is not the process that it was. Raises `CapabilityError`."""
        await self._routes.require("/collective_rpc")
        started = (await self._routes.metrics()).process_start_time
        if self._process_start_time is not None and started != self._process_start_time:
            self._forget()
        self._process_start_time = started

    # Calls that are refused. All raise `UnsafeControlError`.

    @contextmanager
    def exclusive_update(self, name: str) -> Iterator[None]:
        """Run one update of the weights; another one in the meantime is refused."""
        with self._lock:
            self.refuse_during_update(name)
            self._running_update = name
        try:
            yield
        finally:
            with self._lock:
                self._running_update = None

    def refuse_during_update(self, name: str) -> None:
        if self._running_update is not None:
            raise UnsafeControlError(name, f"{self._running_update} is under way on this server; wait for it")

    async def refuse_with_unusable_weights(self, name: str) -> None:
        if self.unusable_weights is not None:
            await self.forget_if_restarted()
        if self.unusable_weights is not None:
            raise UnsafeControlError(
                name,
                f"{self.unusable_weights}: the next request would kill the server or get garbage. Reload a checkpoint "
                "that is known to be good, or restart the server",
            )

    async def refuse_while_weights_sleep(self, name: str) -> None:
        if not self._weights_have_memory and (level := await self.sleep_level()) > 0:
            raise UnsafeControlError(
                name, f'the server sleeps (level {level}), its weights have no memory. wake_up(["weights"]) first'
            )

    async def refuse_with_dropped_weights(self, name: str) -> None:
        if not self._weights_loaded and await self.sleep_level() == 2:
            raise UnsafeControlError(
                name,
                "the weights were dropped (level 2), the server would generate with whatever is in their memory. Use "
                'wake_up(["weights"]), then reload_weights(directory), then wake_up()',
            )
