"""The members of a fleet and their checks: who serves, who was ejected, who is admitted again."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rollouts.engines.event_loop import EngineLoop, SingleFlight
from rollouts.engines.fleet.limits import FleetLimits
from rollouts.engines.fleet.member import Member, MemberState
from rollouts.engines.protocol import Engine
from rollouts.engines.weight_deltas import delta_chain
from rollouts.errors import (
    ArgumentError,
    EngineError,
    FleetMismatchError,
    ServerTimeoutError,
    WeightUpdateError,
)

#: Fields of the capabilities of a server in which servers of one fleet must agree: with others, the same
#: request would be refused or would mean other pixels, another length or other log-probabilities on another
#: server.
_COMPARED = (
    *("engine", "model", "vocab_size", "max_model_len", "raw_logprobs"),
    *("pixel_dtype", "placeholder_ids", "merge_area", "patch_values"),
)
log = logging.getLogger("rollouts.engines.fleet")


class _Problem(NamedTuple):
    """Why a check failed. `is_timeout`: the member may only be slow, or this process.

    `is_another_server`: it answers, and was started again with another model or other weights than the
    fleet's.
    """

    reason: str
    is_timeout: bool = False
    is_another_server: bool = False


class Membership:
    """The members by name.

    `version` is the weight version that a member must serve to be admitted; None before the first update.
    `follow` adds and removes members as a list of servers says; it is called before the checks of all
    members.
    """

    def __init__(self, engines: Mapping[str, Engine], limits: FleetLimits) -> None:
        self._limits = limits
        self.follow: Callable[[], Awaitable[None]] | None = None
        self._model: tuple[str, Mapping[str, object]] | None = None  # what the first member serves, and its name
        self.members = {name: Member(name, engine) for name, engine in engines.items()}
        self.version: str | None = None
        self.adapters: dict[str, str | os.PathLike[str]] = {}  # by name: the directories of what the members have
        self._directory: str | os.PathLike[str] | None = None  # of these weights, where they came from a directory
        self._is_slowness_logged = False
        self._loop = EngineLoop()
        self._checks: SingleFlight[tuple[_Problem | None, MemberState, str | None]] = SingleFlight()
        self._monitor: asyncio.Task[None] | None = None
        self._catching_up: dict[str, asyncio.Task[None]] = {}  # by member: it loads the weights of the fleet
        self._updates = 0  # in progress; meanwhile the members serve the weights of before or those that come

    def enter(self, name: str) -> None:
        """Raises `EngineError` for the request or call `name` where the fleet belongs to another event loop."""
        if self._loop.enter(name):
            self._monitor, self._catching_up = None, {}
            for member in self.members.values():
                member.begin_loop()

    def member(self, name: str) -> Member:
        """Raises `ArgumentError` for a name that no member has."""
        if name not in self.members:
            names = ", ".join(self.members) or "there is none"
            raise ArgumentError("name", name, f"pass the name of a member: {names}")
        return self.members[name]

    async def check_all(self) -> None:
        """Check every member that is not being drained. Raises `FleetMismatchError`."""
        members = [member for member in list(self.members.values()) if member.state is not MemberState.DRAINING]
        await self.check(members)

    async def follow_and_check(self) -> None:
        """Add and remove members as the list of servers says, and check all. Raises `FleetMismatchError`."""
        if self.follow is not None:
            await self.follow()
        await self.check_all()

    async def check_after_failure(self, member: Member) -> None:
        """Check the members after one of them has failed a request: that one is ejected if it fails the check too."""
        member.failed_checks = max(member.failed_checks, self._limits.eject_after - 1)
        try:
            await self.check_all()
        except FleetMismatchError as error:  # one was restarted with another model
            log.error("%s", error)

    async def check(self, members: Sequence[Member]) -> None:
        """Check members: eject those that fail, and admit those that may serve. Raises `FleetMismatchError`."""
        checks = (self._checks.run(member.name, partial(self._checked, member)) for member in members)
        found = await asyncio.gather(*checks, return_exceptions=True)
        results: dict[str, _Problem | None] = {}
        for member, result in zip(members, found, strict=True):
            if isinstance(result, BaseException):
                raise result
            # A member that was ejected meanwhile is not admitted by a check that did not ask what it serves,
            # nor one by a check that asked for the weights of before.
            problem, state, version = result
            if (state, version) == (member.state, self.version):
                results[member.name] = problem
        self._record_round([member for member in members if member.name in results], results)

    async def _checked(self, member: Member) -> tuple[_Problem | None, MemberState, str | None]:
        """What a check has found, None if all is well; the member's state and the fleet's weights when it began."""
        state, version = member.state, self.version
        return await self._problem(member, state), state, version

    async def _problem(self, member: Member, state: MemberState) -> _Problem | None:
        """Why a member must not serve; None if it may. Raises `FleetMismatchError` for a member that is new.

        `state` is that of the beginning: a member that is drained during its check is not asked what one must
        serve to be admitted.
        """
        try:
            async with asyncio.timeout(self._limits.check_timeout):
                await member.engine.check_health()
                await self.check_same_model(member)
                is_serving = state is MemberState.READY
                if not is_serving and self.adapters:
                    await self.load_adapters(member)
                is_asked = not is_serving or (self.version is not None and not self._updates)
                problem = await self._weights_problem(member) if is_asked else ""
            return _Problem(problem, is_another_server=is_serving) if problem else None
        except TimeoutError:
            return _Problem(f"no response to a check within {self._limits.check_timeout:g} s", is_timeout=True)
        except FleetMismatchError as error:
            if state is MemberState.NEW:
                raise
            return _Problem(str(error), is_another_server=state is MemberState.READY)
        except WeightUpdateError as error:
            return _Problem(str(error))
        except EngineError as error:
            return _Problem(str(error), is_timeout=isinstance(error, ServerTimeoutError))

    def _record_round(self, members: Sequence[Member], results: Mapping[str, _Problem | None]) -> None:
        """Checks that time out count against a member only if another one has passed its check meanwhile.

        Where all are slow at once, the cause may be on this side (an event loop that is blocked, a network
        that is full), and ejecting all members would only add to the load.
        """
        is_ready = {member.name: member.state is MemberState.READY for member in members}
        one_passed = any(results[member.name] is None for member in members if is_ready[member.name])
        slow = [name for name, found in results.items() if is_ready[name] and found is not None and found.is_timeout]
        if one_passed or not slow:
            self._is_slowness_logged = False
        elif not self._is_slowness_logged:  # rounds follow each other within seconds
            self._is_slowness_logged = True
            log.warning("no member answers its checks in time; none is ejected: %s", ", ".join(slow))
        for member in members:
            if one_passed or member.name not in slow:
                self._record(member, results[member.name])

    def _record(self, member: Member, problem: _Problem | None) -> None:
        if member.state is MemberState.DRAINING:
            return
        if problem is not None:
            member.failed_checks += 1
            if member.state is MemberState.EJECTED:
                member.reason = problem.reason
            elif (
                member.state is MemberState.NEW
                or problem.is_another_server
                or member.failed_checks >= self._limits.eject_after
            ):
                log.warning("%s is ejected with %d requests: %s", member.name, member.in_flight, problem.reason)
                member.set_state(MemberState.EJECTED, problem.reason)
                member.interrupt()
            return
        # A check that passes ends a row of failures: only failures in a row eject.
        member.failed_checks = 0
        if member.state is not MemberState.READY:
            log.info("%s serves", member.name)
            member.set_state(MemberState.READY)

    async def _weights_problem(self, member: Member) -> str:
        """Why a member must not serve with the weights that it has; empty if it may. Raises `EngineError`.

        Weights that a server does not report count as those of the fleet while it serves, and not when it
        comes back.
        """
        version = await member.engine.served_version()
        is_unknown = version is None and member.state is MemberState.READY
        if self.version is None or version == self.version or is_unknown:
            return ""
        is_updated = member.state is MemberState.READY and self._updates > 0
        if is_updated or member.state is MemberState.DRAINING:  # an update or a drain has begun since the check did
            return ""
        running = self._catching_up.get(member.name)
        if self._directory is not None and (running is None or running.done()):
            load = self._catch_up(member, self._directory, self.version)
            self._catching_up[member.name] = asyncio.create_task(load)
        served = "unknown weights" if version is None else f"the weights {version!r}"
        return f"it serves {served}, the fleet {self.version!r}; update it, then it is admitted"

    async def load_adapters(self, member: Member) -> None:
        """Load the adapters of the fleet that a member lacks. Raises `WeightUpdateError`, `EngineError`."""
        present = await member.engine.adapters()
        for name, directory in list(self.adapters.items()):
            if name not in present:
                await member.engine.load_adapter(name, directory)

    async def check_same_model(self, member: Member) -> None:
        """Raise `FleetMismatchError` if a member serves another model than the first that was compared.

        Each request calls it: it compares only after the engine has asked its server again. Raises `EngineError`.
        """
        found = await member.engine.capabilities()
        if found is member.compared:
            return
        model = {name: getattr(found, name) for name in _COMPARED if hasattr(found, name)}
        if not model:
            return
        first, expected = self._model = self._model or (member.name, model)
        for key, value in expected.items():
            if model.get(key, value) != value:
                error = FleetMismatchError(member.name, key, model[key], first, value)
                raise error.concern(*member.servers)
        member.compared = found

    async def _catch_up(self, member: Member, directory: str | os.PathLike[str], version: str) -> None:
        """Load the fleet's weights into a member that came back with others; its next check admits it."""
        try:
            whole, deltas = await asyncio.to_thread(delta_chain, Path(directory))
            if deltas:  # it may lack what these change
                await member.engine.update_weights(whole, deltas[0].base)
            await member.engine.update_weights(directory, version)
        except (EngineError, WeightUpdateError) as error:
            log.error("%s stays ejected, it could not load the weights %r: %s", member.name, version, error)

    async def drain(self, member: Member, reason: str, seconds: float | None) -> None:
        """Give a member no more requests; return when its requests have ended. After `seconds` they are moved."""
        self.enter("drain")
        member.set_state(MemberState.DRAINING, reason)
        try:
            async with asyncio.timeout(seconds):
                await member.idle.wait()
        except TimeoutError:
            member.interrupt()
            await member.idle.wait()

    def record_update(
        self,
        version: str,
        directory: str | os.PathLike[str] | None,
        failed: Mapping[str, Exception],
        asked: Collection[str],
    ) -> None:
        """The members serve `version` from now on, except for those that failed, which are ejected.

        So are those that serve and are not in `asked`: they were added, or have come back, while the others
        loaded the weights.
        """
        reasons = {name: str(error) for name, error in failed.items()}
        self.version, self._directory = version, directory
        late = (name for name, member in self.members.items() if member.state is MemberState.READY)
        missed = f"it joined while the weights {version!r} were loaded, and may have those of before"
        reasons |= {name: missed for name in late if name not in asked}
        for name in reasons.keys() & self.members.keys():
            log.error("%s is ejected: %s", name, reasons[name])
            self.members[name].set_state(MemberState.EJECTED, reasons[name])
            self.members[name].interrupt()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While the block runs, members may serve other weights than `version`; and all are checked regularly."""
        self.enter("update_weights")
        self._updates += 1
        self.start_monitor()
        try:
            yield
        finally:
            self._updates -= 1

    def start_monitor(self) -> None:
        """Check the members regularly while requests or updates run."""
        if self._monitor is None or self._monitor.done():
            self._monitor = asyncio.create_task(self._monitor_members())

    async def _monitor_members(self) -> None:
        while True:
            if self.follow is not None:
                await self.follow()
            await asyncio.sleep(self._limits.check_seconds)
            if not self._updates and not any(member.in_flight for member in self.members.values()):
                self._monitor = None  # the next request starts it again
                return
            try:
                await self.check_all()
            except FleetMismatchError as error:
                log.error("%s", error)

    def stop_tasks(self) -> None:
        """End the monitor and what it has begun."""
        for task in (self._monitor, *self._catching_up.values()):
            if task is not None:
                task.cancel()
        self._monitor, self._catching_up = None, {}
