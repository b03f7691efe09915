"""Requests that find out what a server is; what they found is remembered until there is a sign of a restart."""

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from rollouts.engines.event_loop import SingleFlight
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse
from rollouts.errors import ApiKeyError, CapabilityError, ServerError

#: The name of these requests in errors.
PROBE_NAME = "probe"

C = TypeVar("C")

#: Less than a server takes to start. While requests are in flight, a restart breaks their connections; after
#: this much time without a request the server may have restarted without any connection breaking.
_QUIET_SECONDS = 5.0


async def probe_request(
    connection: ServerConnection,
    method: str,
    path: str,
    content: Mapping[str, Any] | None = None,
) -> HttpResponse:
    """Send a small request. Raises `ApiKeyError` and what `ServerConnection.request` raises."""
    body = None if content is None else [json.dumps(content).encode()]
    response = await connection.request(method, path, name=PROBE_NAME, body=body, slot=False)
    if response.status == 401:
        raise ApiKeyError(
            PROBE_NAME,
            f"{connection.base_url} refuses the API key for {path}; pass its key as api_key=, in "
            "commands with --api-key-env NAME (tinker: --upstream-api-key-env)",
        )
    return response


class CapabilityCache(Generic[C]):
    """Probes a server once, and again after a restart of which there is any sign.

    `start_time` returns when the server process started, `probe` its capabilities, and `on_restart` is called
    before a new probe. Concurrent callers share one probe.
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
            # None again where a connection broke during the probe: the server may be another one.
            capabilities = self.known
        return capabilities

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
        # Where the server does not say when it started, any silence may have been a restart.
        if self.known is None or started is None or started != self._server_started:
            self._on_restart()
            self.known = await self._probe()
        self._server_started = started
        self._last_response = time.monotonic()
