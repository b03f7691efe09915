"""What a server was found to be is remembered until there is a sign that it was restarted."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from rollouts.engines.event_loop import SingleFlight
from rollouts.errors import CapabilityError, ServerError

C = TypeVar("C")

#: Less than a server takes to start. While requests are in flight, a restart breaks their connections; after this much
#: time without a request the server may have restarted without any connection breaking.
_QUIET_SECONDS = 5.0


class CapabilityCache(Generic[C]):
    """Probes a server once, and again after a restart of which there is any sign.

    `start_time` returns when the server process started, `probe` its capabilities, and `on_restart` is called before
    a new probe. Concurrent callers share one probe.
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[C]],
        start_time: Callable[[], Awaitable[float | None]],
        on_restart: Callable[[], None],
    ) -> None:
        self._probe = probe
        self._start_time = start_time
        self._on_restart = on_restart
        self._probing: SingleFlight[None] = SingleFlight()
        self._server_started: float | None = None  # None where the server does not report it
        self._last_response = 0.0
        self.known: C | None = None
        self._exchanges = 0

    async def get(self) -> C:
        """The capabilities. Raises what `probe` raises."""
        quiet = self._exchanges == 0 and time.monotonic() - self._last_response > _QUIET_SECONDS
        capabilities = None if quiet else self.known
        while capabilities is None:
            await self._probing.run("probe", self._refresh)
            capabilities = self.known
        return capabilities

    def forget(self) -> None:
        self.known = None

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """While a request is in flight, a restart is noticed by its connection breaking."""
        self._exchanges += 1
        try:
            yield
        finally:
            self._exchanges -= 1
            self._last_response = time.monotonic()

    async def _refresh(self) -> None:
        """Probe, unless the server is still the process that was probed before."""
        try:
            started = await self._start_time()
        except (CapabilityError, ServerError):
            started = None
        if self.known is None or started is None or started != self._server_started:
            self._on_restart()
            self.known = await self._probe()
        self._server_started = started
        self._last_response = time.monotonic()
