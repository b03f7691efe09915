"""Several engines as one `Engine`."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

from rollouts.engines.event_loop import SingleFlight
from rollouts.engines.fleet.control import FleetControl
from rollouts.engines.fleet.limits import FleetLimits
from rollouts.engines.fleet.member import Member, MemberState, MemberStatus
from rollouts.engines.fleet.membership import Membership
from rollouts.engines.fleet.routing import SessionTable
from rollouts.engines.fleet.servers import RayServerNames
from rollouts.engines.http.address import server_identity
from rollouts.engines.http.connection import HttpLimits
from rollouts.engines.lazy import LazyEngine
from rollouts.engines.protocol import Engine, GenerateRequest, GenerateResult, InFlight, TokenListener
from rollouts.engines.server_kinds import ServerKind, server_engine
from rollouts.engines.vllm.server_media_cache import MediaCacheCounts
from rollouts.errors import (
    ArgumentError,
    CapabilityError,
    EngineClosedError,
    EngineError,
    EngineStartError,
    FleetMismatchError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    UnknownAdapterError,
    WeightUpdateError,
    no_server,
)

log = logging.getLogger("rollouts.engines.fleet")

#: How often a request of a member is sent again after a failure. A fleet has another server to ask, so that
#: long retries of one would only delay the episode.
RETRIES_IN_FLEET = 2


class EngineFleet(Engine):
    """Several engines as one.

        fleet = EngineFleet.from_urls(["http://10.0.0.1:8000", "http://10.0.0.2:8000"])

    All requests of a session go to one member, which has its prefix in the KV cache and its images. Which one
    is a hash of the session's id; a member that is overloaded is passed over for new sessions, which then
    stay where they are. A member that fails its health checks, or fails a request and then a check, is
    ejected: its requests in flight and its sessions move to others (an engine for a server sends the media
    again), and it serves again once its checks pass. A turn is always sampled by one member: what a failed
    member has sampled of it is dropped.

    `engines` maps a name, which errors and `members` show, to an engine that this fleet closes. The members
    must serve the same model: before the first request, engines with `capabilities` are compared, and
    `FleetMismatchError` names the difference. Members can be added and removed while requests run. `control`
    makes control calls at all of them.

    A fleet belongs to the event loop on which it is used first; after that is closed, another one may follow.
    """

    def __init__(self, engines: Mapping[str, Engine], *, limits: FleetLimits | None = None) -> None:
        self._limits = limits or FleetLimits()
        self._membership = Membership(engines, self._limits)
        self._sessions = SessionTable(self._limits)
        self.control = FleetControl(self._membership)
        self._waiting_check: SingleFlight[None] = SingleFlight()  # one for all requests that wait for a member
        self._removals: dict[str, asyncio.Task[None]] = {}  # of members that the list of servers names no more
        self._closed = False

    @classmethod
    def from_urls(
        cls,
        urls: Sequence[str],
        *,
        kind: ServerKind = "vllm",
        limits: FleetLimits | None = None,
        http_limits: HttpLimits | None = None,
        **options: Any,
    ) -> Self:
        """A fleet of servers of one kind; `options` are those of `VLLMEngine`, or with kind="sglang" of
        `SGLangEngine`, `http_limits` the engines' `limits`."""
        return cls(server_engines(urls, kind, http_limits, options), limits=limits)

    @classmethod
    def from_ray(
        cls,
        names: Sequence[str],
        *,
        namespace: str | None = None,
        kind: ServerKind = "vllm",
        limits: FleetLimits | None = None,
        http_limits: HttpLimits | None = None,
        **options: Any,
    ) -> Self:
        """A fleet of the servers of actors of Ray, by their names, such as those of `rollouts.ray.RayServers`.

        Requests go to the servers, not through the actors. While requests run, the actors are asked for the addresses
        again: one that Ray has started on another node is followed there. The options are those of `from_urls`. Blocks
        until the actors have answered. Raises `RolloutsError`, `ArgumentError` and `MissingExtraError`.
        """
        names_of_actors = RayServerNames(names, namespace)
        make_engines = partial(server_engines, kind=kind, limits=http_limits, options=options)
        fleet = cls(make_engines(names_of_actors.read()), limits=limits)
        fleet._membership.follow = lambda: fleet._follow(names_of_actors, make_engines)
        return fleet

    # The calls of an engine.

    @property
    def vocab_size(self) -> int | None:
        """The first known vocabulary size of the members."""
        return self._first_known("vocab_size")

    @property
    def max_model_len(self) -> int | None:
        """The first known length of the context of the members, in tokens."""
        return self._first_known("max_model_len")

    def _first_known(self, name: str) -> int | None:
        values = (getattr(member.engine, name) for member in self._membership.members.values())
        return next((value for value in values if value is not None), None)

    @property
    def weight_version(self) -> str:
        """The version of the last update; before the first, that of the first member that serves."""
        if self._membership.version is not None:
            return self._membership.version
        members = sorted(self._membership.members.values(), key=lambda member: member.state is not MemberState.READY)
        return members[0].engine.weight_version if members else ""

    @property
    def media_cache_counts(self) -> MediaCacheCounts:
        """The sum of those of the members that have them."""
        engines = self.engines.values()
        counts = [getattr(engine, "media_cache_counts", MediaCacheCounts()) for engine in engines]
        return sum(counts, MediaCacheCounts())

    async def context_length(self) -> int | None:
        """`max_model_len`; before the first check of the members it is awaited. No member is started for it."""
        if self.max_model_len is None and any(member.state is MemberState.NEW for member in self.members):
            with suppress(EngineError):  # `generate` raises it
                await self._waiting_check.run("check", self._membership.follow_and_check)
        return self.max_model_len

    async def check_health(self) -> None:
        """Raises `ServerUnreachableError` where every member is ejected."""
        if all(member.state is MemberState.EJECTED for member in self.members):
            raise no_server("check_health", {member.name: member.reason for member in self.members})

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        """Sample from the session's member, or from another one after a failure.

        Raises what the member raises where another member could not help (an invalid request, a prompt that
        is too long); `ServerUnreachableError` if no member is available, or if `FleetLimits.failovers` more have
        failed; `FleetMismatchError` and `EngineClosedError`.
        """
        self._membership.enter(request.request_id)
        failures: dict[str, EngineError] = {}
        reloaded: set[str] = set()  # members that were given the adapters of the fleet again
        while True:
            member = self._reserved_member(request, failures) or await self._available_member(request, failures)
            try:
                return await self._generate_on(member, request)
            except UnknownAdapterError as error:
                # A server that was restarted since its last check has none of the adapters.
                if error.adapter not in self._membership.adapters or member.name in reloaded:
                    raise
                # Once for each member: a second refusal is not for want of the adapter.
                reloaded.add(member.name)
                try:
                    await self._membership.load_adapters(member)
                except (EngineError, WeightUpdateError) as reason:
                    raise error from reason
                continue
            except EngineError as error:
                if not _is_failure_of_server(error):
                    raise
                failures[member.name] = error
            await self._membership.check_after_failure(member)
            if len(failures) > self._limits.failovers:
                raise no_server(request.request_id, failures) from failures[member.name]
            log.info("request %s moves on from %s: %s", request.request_id, member.name, failures[member.name])

    async def update_weights(self, weights: Any, version: str, *, in_flight: InFlight = "abort") -> None:
        """`control.update_weights`, which also returns the result of each member."""
        await self.control.update_weights(weights, version, in_flight=in_flight)

    async def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> None:
        """`control.load_adapter`: a LoRA adapter for `GenerateRequest.adapter`, at every member or at none."""
        await self.control.load_adapter(name, directory)

    async def unload_adapter(self, name: str) -> None:
        """`control.unload_adapter`."""
        await self.control.unload_adapter(name)

    async def adapters(self) -> Mapping[str, str]:
        """The adapters of the fleet: the directory of each by its name."""
        return {name: str(directory) for name, directory in self._membership.adapters.items()}

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests, at whichever members they run."""
        ids = list(request_ids)
        await self._everywhere(lambda engine: engine.abort(ids))

    async def abort_all(self) -> None:
        """End every request of this fleet, and none of other clients."""
        await self._everywhere(lambda engine: engine.abort_all())

    async def close(self) -> None:
        """Refuse further requests and close the engines, all of them even where one fails."""
        self._membership.enter("close")
        self._closed = True
        self._membership.stop_tasks()
        for removal in self._removals.values():
            removal.cancel()
        results = await asyncio.gather(*(each.close() for each in self.engines.values()), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    # Members.

    @property
    def members(self) -> tuple[MemberStatus, ...]:
        """The members as they are now."""
        return tuple(member.status() for member in self._membership.members.values())

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The engines by the names of their members, at this moment."""
        return {name: member.engine for name, member in self._membership.members.items()}

    async def add(self, name: str, engine: Engine) -> MemberStatus:
        """Add a member, which serves at once if its checks pass, else as soon as they do.

        Sessions that exist stay where they are. Raises `ArgumentError` for a name that the fleet has;
        `FleetMismatchError` if it serves another model, and then it is not added.
        """
        member = Member(name, engine)
        await self._membership.check([member])
        # Both again, because the checks took time.
        self._refuse_if_closed("add")
        if name in self._membership.members:
            raise ArgumentError("name", name, "pass a name that no member has, or remove that one first")
        self._membership.members[name] = member
        return member.status()

    async def drain(self, name: str, *, seconds: float | None = None) -> None:
        """Give a member no more requests; return when its requests have ended.

        Its sessions move to others with their next request. After `seconds`, what still runs is moved as
        well. The member stays in the fleet until `remove`; `undrain` lets it serve again.
        """
        await self._membership.drain(self._membership.member(name), "it is being drained", seconds)

    async def undrain(self, name: str) -> MemberStatus:
        """Let a drained member serve again, as soon as its checks pass."""
        member = self._membership.member(name)
        if member.state is MemberState.DRAINING:
            member.set_state(MemberState.EJECTED, "not checked since it was drained")
        await self._membership.check([member])
        return member.status()

    async def remove(self, name: str, *, seconds: float | None = None) -> None:
        """Drain a member, take it out of the fleet and close its engine."""
        await self.drain(name, seconds=seconds)
        member = self._membership.members.pop(name, None)
        if member is not None:
            await member.engine.close()

    async def check(self) -> tuple[MemberStatus, ...]:
        """Check every member now, as is done while requests run. Raises `FleetMismatchError`."""
        await self._membership.check_all()
        return self.members

    # One request.

    def _reserved_member(self, request: GenerateRequest, failures: Mapping[str, EngineError]) -> Member | None:
        """The member for a request, which counts it as in flight from now on; None while none is available.

        Members that are in `failures` have failed the request, and are left out. Raises `EngineClosedError`.
        """
        self._refuse_if_closed(request.request_id)
        members = self._membership.members
        member = members.get(self._sessions.last_member(request.session_id))
        if member is None or member.state is not MemberState.READY or member.name in failures:
            others = [other for other in members.values() if other.name not in failures]
            loads = {other.name: other.in_flight for other in others if other.state is MemberState.READY}
            # Sessions stay where they are placed: none is placed before every new member was checked.
            if not loads or any(other.state is MemberState.NEW for other in others):
                return None
            member = members[self._sessions.member_of(request.session_id, request.request_id, loads)]
        member.begin_request(request.sampling.n)
        self._membership.start_monitor()
        return member

    async def _available_member(self, request: GenerateRequest, failures: Mapping[str, EngineError]) -> Member:
        """Wait for a member, and reserve it. Raises `ServerUnreachableError` and `FleetMismatchError`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.wait_seconds
        while (member := self._reserved_member(request, failures)) is None:
            others = [other for other in self._membership.members.values() if other.name not in failures]
            may_serve = any(other.state is MemberState.NEW for other in others)
            if not others or (not may_serve and loop.time() >= deadline):
                reasons = {other.name: other.reason for other in others}
                error = no_server(request.request_id, {**reasons, **failures})
                raise error.concern(*(server for other in others for server in other.servers))
            if not may_serve:
                await asyncio.sleep(min(self._limits.check_seconds, max(0.0, deadline - loop.time())))
            # The monitor has ended if no request is in flight, so that new addresses of servers are read
            # here.
            await self._waiting_check.run("check", self._membership.follow_and_check)
        return member

    async def _generate_on(self, member: Member, request: GenerateRequest) -> GenerateResult:
        """Sample at a member. Raises `ServerUnreachableError` where it is given up meanwhile."""
        interrupt = asyncio.timeout(None)
        try:
            if member.compared is None and isinstance(member.engine, LazyEngine):
                await member.engine.start()
            await self._compare_again(member, request)
            async with interrupt:
                member.interrupts.add(interrupt)
                return await member.engine.generate(request)
        except TimeoutError as error:
            if not interrupt.expired():
                raise
            reason = f"{member.name} was given up while the request ran: {member.reason}"
            raise ServerUnreachableError(request.request_id, reason) from error
        finally:
            member.interrupts.discard(interrupt)
            member.end_request(request.sampling.n)

    async def _compare_again(self, member: Member, request: GenerateRequest) -> None:
        """Compare what the engine knows of its server by now, which may have been started again with another model.

        Raises `ServerUnreachableError` if the member served the same model before, so that the request moves
        on.
        """
        try:
            await self._membership.check_same_model(member)
        except FleetMismatchError as error:
            if member.compared is None:
                raise
            reason = f"it was started as another server: {error.reason}"
            raise ServerUnreachableError(request.request_id, reason) from error

    async def _follow(
        self, servers: RayServerNames, make_engines: Callable[[Sequence[str]], Mapping[str, Engine]]
    ) -> None:
        """Add and remove members as the actors of the servers say."""
        try:
            if (urls := await asyncio.to_thread(servers.read_if_changed)) is None:
                return
            engines = make_engines(urls)
        except ValueError as error:
            log.error("the members of the fleet stay as they are: %s", error)
            return
        members = self.engines
        for name in members.keys() - engines.keys() - self._removals.keys():
            removal = asyncio.create_task(self.remove(name, seconds=self._limits.wait_seconds))
            self._removals[name] = removal
            removal.add_done_callback(partial(self._removals.pop, name))  # the task is its default value
        await asyncio.gather(*(self._add_listed(name, engines[name]) for name in engines if name not in members))

    async def _add_listed(self, name: str, engine: Engine) -> None:
        """Add a member that the list of servers names. An error is logged."""
        try:
            await self.add(name, engine)
        except EngineError as error:
            log.error("%s is not added: %s", name, error)

    def _refuse_if_closed(self, request_id: str) -> None:
        if self._closed:
            raise EngineClosedError(request_id, "the fleet is closed")

    async def _everywhere(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        """Call every engine; those that cannot do it are passed over."""

        async def called(engine: Engine) -> None:
            with suppress(CapabilityError):
                await call(engine)

        await asyncio.gather(*map(called, self.engines.values()))


def server_engines(
    urls: Sequence[str], kind: ServerKind, limits: HttpLimits | None, options: Mapping[str, Any]
) -> dict[str, Engine]:
    """An engine for each address, by the address without credentials."""
    limits = limits or HttpLimits(retries=RETRIES_IN_FLEET)
    engines: dict[str, Engine] = {}
    servers: dict[str, str] = {}  # by `server_identity`
    for url in urls:
        engine = server_engine(kind, url, limits=limits, **options)
        first = servers.setdefault(server_identity(engine.base_url), engine.base_url)
        if engine.base_url in engines or first != engine.base_url:
            raise ArgumentError("urls", engine.base_url, f"name each server once; this is the server of {first}")
        engines[engine.base_url] = engine
    return engines


def _is_failure_of_server(error: EngineError) -> bool:
    """Whether another server could answer the request."""
    if isinstance(error, ServerError):
        return error.status >= 500
    return isinstance(error, ServerUnreachableError | ServerTimeoutError | EngineClosedError | EngineStartError)
