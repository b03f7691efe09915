"""Servers behind a router: requests go through the router, control calls to each server."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from rollouts.engines.event_loop import SingleFlight
from rollouts.engines.fleet.control import FleetControl
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.membership import Member, Membership
from rollouts.engines.protocol import Engine, GenerateRequest, GenerateResult, InFlight, check_update_arguments
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.server_media_cache import MediaCacheCounts, ServerMediaCache
from rollouts.errors import ArgumentError, EngineError, WeightUpdateError

log = logging.getLogger("rollouts.engines.fleet")

#: This many sessions keep the record of the media that their server holds.
_MAX_SESSIONS = 4096

#: After so many sessions whose media were missing so many times, the router is reported. Once can be a restart.
_SESSIONS_WITH_MISSES, _MISSES = 3, 2


class RoutedEngine(VLLMEngine):
    """vLLM servers behind a router that keeps each session at one of them by the header `X-Session-ID`.

        engine = RoutedEngine("http://router:8080", ["http://10.0.0.1:8000", "http://10.0.0.2:8000"])

    Requests go to the router; `control`, a `FleetControl`, calls each of `servers`, which are all servers behind it.
    The `options` are those of `VLLMEngine`. The data of a medium are sent once in each session. A router that does not
    keep sessions costs time and no correctness: the server reports that it lacks them, and the request is sent
    again with it. Where that happens repeatedly within sessions, a warning with the cure is logged once
    (`lost_sessions` counts).

    An `EngineFleet` needs no router, and moves sessions when a server fails; use this class where a router is there.
    """

    def __init__(self, router_url: str, servers: Sequence[str], **options: Any) -> None:
        if not servers:
            raise ArgumentError("servers", servers, "name the servers behind the router; control calls go to them")
        self._session_media: OrderedDict[str, ServerMediaCache] = OrderedDict()
        self._misses: Counter[str] = Counter()
        self._forgotten_counts = MediaCacheCounts()
        self._is_reported = False
        super().__init__(router_url, **options)
        shared = {name: options[name] for name in ("model", "api_key", "expected") if name in options}
        self._servers = EngineFleet.from_urls(servers, **shared)
        self._checking: SingleFlight[None] = SingleFlight()
        self._is_checked = False
        self.control: Any = _RoutedControl(self._servers._membership, self._forget_media)

    @property
    def servers(self) -> Mapping[str, Engine]:
        """An engine for each server behind the router, by its address; requests do not go through them."""
        return self._servers.engines

    @property
    def lost_sessions(self) -> int:
        """How many of the latest sessions came to a server that lacked their media, more than once."""
        return sum(count >= _MISSES for count in self._misses.values())

    @property
    def media_cache_counts(self) -> MediaCacheCounts:
        """How many media items requests carried, and how many they named only."""
        return sum((cache.counts for cache in list(self._session_media.values())), self._forgotten_counts)

    async def capabilities(self) -> ServerCapabilities:
        """Those that the router reports. Raises `FleetMismatchError` where the servers do not serve the same model."""
        if not self._is_checked:
            await self._checking.run("check", self._check_servers)
        return await super().capabilities()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """As `VLLMEngine.generate`; raises `FleetMismatchError` where the servers do not serve the same model."""
        if not self._is_checked:
            await self._checking.run("check", self._check_servers)
        return await super().generate(request)

    async def update_weights(
        self, weights: str | os.PathLike[str], version: str, *, in_flight: InFlight = "abort"
    ) -> None:
        """Load a checkpoint directory into every server.

        Raises `WeightUpdateError` if any fails, because the router goes on sending it requests.
        """
        check_update_arguments(version, in_flight)
        await self._servers.check()  # so that servers that failed the last time are asked again
        membership = self._servers._membership
        await membership.caught_up()
        updated = await self.control.update_weights(weights, version, in_flight=in_flight)
        self._set_weight_version(version)
        # A server that the fleet has ejected was not asked, and the router goes on using it.
        results = {name: member.reason for name, member in membership.members.items()} | updated
        if failed := {name: error for name, error in results.items() if error is not None}:
            listed = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise WeightUpdateError(
                f"{len(failed)} of {len(results)} servers have not taken the weights {version!r} ({listed}). The "
                "others serve them, and the router sends requests to all: take these servers out of it, or repeat the "
                "update"
            ).concern_servers_of(failed.values())

    async def load_adapter(self, name: str, directory: str | os.PathLike[str], *, check: bool = True) -> None:
        """Load a LoRA adapter into every server, or into none."""
        await self.control.load_adapter(name, directory)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from every server."""
        await self.control.unload_adapter(name)

    async def adapters(self) -> Mapping[str, str]:
        """The loaded adapters: the directory of each by its name."""
        return await self._servers.adapters()

    async def close(self) -> None:
        """Refuse further requests and close the connections, to the router and to the servers."""
        await super().close()
        await self._servers.close()

    # What the router hides.

    async def _check_servers(self) -> None:
        await self._servers.check()
        self._is_checked = True

    async def _is_paused(self) -> bool:
        """Whether any server is paused: the one of a session is not known."""
        return any((await self.control.is_paused()).values())

    async def _abort_on_server(self, request_ids: Iterable[str]) -> bool:
        """Abort requests at every server; whether all received that. A failure is only logged."""
        try:
            await self.control.abort(list(request_ids))
        except EngineError as error:
            self._log_failed_abort(request_ids, error)
            return False
        self._abort_fails = False
        return True

    async def _process(self) -> float | None:
        """A number that changes when any server is started again; None where one does not report when it started."""
        metrics = await self.control.metrics()
        started = [server.process_start_time for server in metrics.values()]
        known = [time for time in started if time is not None]
        return sum(known) if len(known) == len(started) else None

    # Media of sessions.

    def _media_cache_of(self, request: GenerateRequest) -> ServerMediaCache:
        if request.session_id is None:
            return ServerMediaCache()
        cache = self._session_media.setdefault(request.session_id, ServerMediaCache())
        self._session_media.move_to_end(request.session_id)
        if len(self._session_media) > _MAX_SESSIONS:
            oldest, forgotten = self._session_media.popitem(last=False)
            self._forgotten_counts += forgotten.counts
            self._misses.pop(oldest, None)
        return cache

    def _record_cache_miss(self, request: GenerateRequest) -> None:
        if request.session_id is not None:
            self._misses[request.session_id] += 1
        if self.lost_sessions >= _SESSIONS_WITH_MISSES and not self._is_reported:
            self._is_reported = True
            log.warning(
                "the servers behind %s repeatedly lack images that the same session has sent before: the router does "
                "not keep sessions at one server, so that images and prefixes are sent and computed again. Let it hash "
                "the header X-Session-ID (vllm-router: --policy consistent_hash; nginx: hash $http_x_session_id "
                "consistent; HAProxy: balance hdr(X-Session-ID)), or use EngineFleet without a router",
                self.base_url,
            )

    def _forget_server(self) -> None:
        super()._forget_server()
        self._forget_media()

    def _forget_media(self) -> None:
        """The servers may have lost their media, for a reason that is not the router's."""
        for cache in list(self._session_media.values()):
            cache.clear()
        self._misses.clear()


class _RoutedControl(FleetControl):
    """`FleetControl` of servers whose requests come through a router."""

    def __init__(self, membership: Membership, forget_media: Callable[[], None]) -> None:
        super().__init__(membership)
        self._forget_media = forget_media

    async def is_paused(self, *, seconds: float | None = None) -> dict[str, bool]:
        """Whether each server generates nothing for now."""
        return await self._each("is_paused", lambda control: control.is_paused(), seconds)

    async def abort(self, request_ids: Sequence[str], *, seconds: float | None = None) -> dict[str, None]:
        """End requests by their ids, at whichever server they run."""
        return await self._each("abort", lambda control: control.abort(request_ids), seconds)

    async def _outcomes(
        self, members: Sequence[Member], call: Callable[[Member], Awaitable[Any]], seconds: float | None, name: str
    ) -> dict[str, Any]:
        clears = name in ("pause", "sleep", "reset_media_caches", "update_weights", "rolling_update")
        try:
            if clears:
                self._forget_media()
            return await super()._outcomes(members, call, seconds, name)
        finally:
            if clears:  # again, because a request that ran beside the call may have recorded some
                self._forget_media()
