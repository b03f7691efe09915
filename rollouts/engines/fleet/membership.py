"""The members of a fleet and their checks: who serves, who was ejected, who is admitted again."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from rollouts.engines.event_loop import EngineLoop, SingleFlight
from rollouts.engines.protocol import Engine
from rollouts.errors import (
    ArgumentError,
    CapabilityError,
    EngineError,
    FleetMismatchError,
    ServerTimeoutError,
    WeightUpdateError,
)
from rollouts.values import check_integer, check_positive, finite_number

# Bounds of a fleet: how often it checks its members, and when it ejects, moves and waits.


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Seconds and counts.

    While requests run, every member is checked each `check_seconds`, and a check may take `check_timeout` seconds. A
    member is ejected after `eject_after` failed checks in a row, and at once if it fails a check after it failed a
    request; it serves again after a check without failure.

    A request moves to at most `failovers` further members. The bound is small on purpose: a request that kills servers
    must not reach all of them. A request for which no member is available waits `wait_seconds`.

    A new session goes to another member than its hash chooses if that one has more requests in flight than
    `spill_ratio` times the mean of all members, and more than `spill_requests`. The last `sessions` sessions keep their
    member; an older one gets a member as a new session does.
    """

    check_seconds: float = 5.0
    check_timeout: float = 10.0
    eject_after: int = 2
    failovers: int = 2
    wait_seconds: float = 60.0
    spill_ratio: float = 1.25
    spill_requests: int = 8
    sessions: int = 2**18

    def __post_init__(self) -> None:
        least_counts = {"eject_after": 1, "failovers": 0, "sessions": 1, "spill_requests": 0}
        for name, least in least_counts.items():
            check_integer(name, getattr(self, name), least=least)
        for name in ("check_seconds", "check_timeout"):
            check_positive(name, getattr(self, name), "pass a finite number of seconds above 0")
        if (seconds := finite_number(self.wait_seconds)) is None or seconds < 0:
            raise ArgumentError("wait_seconds", self.wait_seconds, "pass a finite number of seconds, 0 or more")
        if (ratio := finite_number(self.spill_ratio)) is None or ratio < 1:
            raise ArgumentError("spill_ratio", self.spill_ratio, "pass a finite number of at least 1")


# What a fleet asks of an engine: whether it is alive, which model it serves, which weights.


#: Fields of the capabilities of a server in which servers of one fleet must agree: with others, the same request would
#: be refused or would mean other pixels, another length or other log-probabilities on another server.
_COMPARED = (
    *("engine", "model", "vocab_size", "max_model_len", "raw_logprobs"),
    *("pixel_dtype", "placeholder_ids", "merge_area", "patch_values"),
)


async def health_problem(engine: Engine) -> str:
    """Why an engine cannot serve now; empty if it can, or if it has no way to tell. Raises `EngineError`."""
    check_health = getattr(engine, "check_health", getattr(getattr(engine, "control", None), "check_health", None))
    if check_health is not None:
        await check_health()
        return ""
    health = getattr(engine, "health", None)
    return "" if health is None or await health() else "its health check failed"


async def served_weight_version(engine: Engine) -> str | None:
    """The version that an engine serves, read from the server where there is one; None where it cannot be known."""
    control: Any = getattr(engine, "control", None)
    if control is None:
        version = getattr(engine, "weight_version", None)
        return None if version is None else str(version)
    read_version = getattr(control, "weight_version", None)  # the control calls of other engines may lack some
    if read_version is None:
        return None
    try:
        return str(await read_version())
    except CapabilityError:
        return None


# One engine of a fleet: its state, and the requests that are in flight at it.


class MemberState(StrEnum):
    """Whether a member is given requests.

    NEW: not checked yet. READY: it serves. EJECTED: it failed, and is checked until it serves again. DRAINING: it
    finishes what it has and is given nothing more.
    """

    NEW = "new"
    READY = "ready"
    EJECTED = "ejected"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member as it is now. `reason` says why it does not serve; `in_flight` counts its requests."""

    name: str
    state: MemberState
    reason: str
    in_flight: int
    weight_version: str


@dataclass(eq=False, slots=True)
class Member:
    """The fleet's record of one engine."""

    name: str
    engine: Engine
    state: MemberState = MemberState.NEW
    reason: str = "not checked yet"
    in_flight: int = 0
    failed_checks: int = 0
    #: Its capabilities when its model was compared with that of the others; None for an engine that has not started.
    compared: object = None
    #: The timeouts around the requests in flight, which `interrupt` lets expire.
    interrupts: set[asyncio.Timeout] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # no request is in flight
    ejected: asyncio.Event = field(default_factory=asyncio.Event)  # the next ejection, which replaces it

    def __post_init__(self) -> None:
        self.begin_loop()

    def begin_loop(self) -> None:
        """Requests and waits of an event loop before have ended with it."""
        self.in_flight = 0
        self.interrupts.clear()
        self.idle, self.ejected = asyncio.Event(), asyncio.Event()
        self.idle.set()

    @property
    def weight_version(self) -> str:
        return str(getattr(self.engine, "weight_version", ""))

    @property
    def servers(self) -> tuple[str, ...]:
        """The address of its server, without credentials; empty for an engine that has none."""
        address = getattr(self.engine, "base_url", None)
        return (address,) if isinstance(address, str) else ()

    def status(self) -> MemberStatus:
        return MemberStatus(self.name, self.state, self.reason, self.in_flight, self.weight_version)

    def set_state(self, state: MemberState, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self.failed_checks = 0
        if state is MemberState.EJECTED:
            self.ejected.set()
            self.ejected = asyncio.Event()

    def begin_request(self, samples: int) -> None:
        self.in_flight += samples
        self.idle.clear()

    def end_request(self, samples: int) -> None:
        self.in_flight -= samples
        if not self.in_flight:
            self.idle.set()

    def interrupt(self) -> None:
        """End the requests in flight."""
        for timeout in list(self.interrupts):
            if not timeout.expired():
                timeout.reschedule(0.0)


log = logging.getLogger("rollouts.engines.fleet")

#: Attempts to load the weights of the fleet into a member that came back are at most this far apart.
_LONGEST_CATCH_UP_DELAY = 300.0


class _Problem(NamedTuple):
    """Why a check failed. `is_timeout`: the member may only be slow, or this process.

    `is_another_server`: it answers, and was started again with another model or other weights than the fleet's.
    """

    reason: str
    is_timeout: bool = False
    is_another_server: bool = False


class _Checked(NamedTuple):
    """What a check has found, None if all is well; the state of the member and the fleet's weights when it began."""

    problem: _Problem | None
    state: MemberState
    version: str | None


@dataclass(slots=True, eq=False)
class _CatchUp:
    """A member loads the weights of the fleet; `ended_at` is when the last attempt ended, by the event loop's clock."""

    task: asyncio.Task[None]
    attempts: int = 1
    ended_at: float = 0.0


class Membership:
    """The members by name.

    `version` is the weight version that a member must serve to be admitted; None before the first update. `follow`
    adds and removes members as a list of servers says; it is called before the checks of all members.
    """

    def __init__(self, engines: Mapping[str, Engine], limits: FleetLimits) -> None:
        self._limits = limits
        self.follow: Callable[[], Awaitable[None]] | None = None
        self._model: tuple[str, Mapping[str, object]] | None = None  # what the first member serves, and its name
        self.members = {name: Member(name, checked_engine(engine)) for name, engine in engines.items()}
        self.version: str | None = None
        self.adapters: dict[str, str | os.PathLike[str]] = {}  # by name: the directories of what the members have
        self._directory: str | os.PathLike[str] | None = None  # of these weights, where they came from a directory
        self._is_slowness_logged = False
        self._loop = EngineLoop()
        self._checks: SingleFlight[_Checked] = SingleFlight()
        self._monitor: asyncio.Task[None] | None = None
        self._catching_up: dict[str, _CatchUp] = {}  # by member, until it serves
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

    def engines(self) -> dict[str, Engine]:
        """The engines by the names of their members, at this moment."""
        return {name: member.engine for name, member in self.members.items()}

    async def check_all(self) -> None:
        """Check every member that is not being drained. Raises `FleetMismatchError`."""
        members = [member for member in list(self.members.values()) if member.state is not MemberState.DRAINING]
        await self._check(members)

    async def follow_and_check(self) -> None:
        """Add and remove members as the list of servers says, and check all. Raises `FleetMismatchError`."""
        if self.follow is not None:
            await self.follow()
        await self.check_all()

    async def check(self, member: Member) -> None:
        """Check one member that does not serve, and admit it if it may. Raises `FleetMismatchError`."""
        await self._check([member])

    async def check_after_failure(self, member: Member) -> None:
        """Check the members after one of them has failed a request: that one is ejected if it fails the check too."""
        member.failed_checks = max(member.failed_checks, self._limits.eject_after - 1)
        try:
            await self.check_all()
        except FleetMismatchError as error:  # one was restarted with another model
            log.error("%s", error)

    async def _check(self, members: Sequence[Member]) -> None:
        checks = (self._checks.run(member.name, partial(self._checked, member)) for member in members)
        found = await asyncio.gather(*checks, return_exceptions=True)
        results: dict[str, _Problem | None] = {}
        for member, result in zip(members, found, strict=True):
            if isinstance(result, BaseException):
                raise result
            # A member that was ejected meanwhile is not admitted by a check that did not ask what it serves, nor one by
            # a check that asked for the weights of before.
            if (result.state, result.version) == (member.state, self.version):
                results[member.name] = result.problem
        self._record_round([member for member in members if member.name in results], results)

    async def _checked(self, member: Member) -> _Checked:
        state, version = member.state, self.version
        return _Checked(await self._problem(member, state), state, version)

    async def _problem(self, member: Member, state: MemberState) -> _Problem | None:
        """Why a member must not serve; None if it may. Raises `FleetMismatchError` for a member that is new.

        `state` is that of the beginning: a member that is drained during its check is not asked what one must serve to
        be admitted.
        """
        try:
            async with asyncio.timeout(self._limits.check_timeout):
                if problem := await health_problem(member.engine):
                    return _Problem(problem)
                is_serving = state is MemberState.READY
                problem = await (self._serving_problem(member) if is_serving else self._admission_problem(member))
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

        Where all are slow at once, the cause may be on this side (an event loop that is blocked, a network that is
        full), and ejecting all members would only add to the load.
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
        member.failed_checks = 0
        if member.state is not MemberState.READY:
            log.info("%s serves", member.name)
            self._catching_up.pop(member.name, None)
            member.set_state(MemberState.READY)

    async def _serving_problem(self, member: Member) -> str:
        """Why a member that serves must not any more: it was started again as another server. Raises as the next."""
        await self.compare(member)
        return "" if self.version is None or self._updates else await self._weights_problem(member)

    async def _admission_problem(self, member: Member) -> str:
        """Why a member that does not serve yet must not; empty if it may. Raises `FleetMismatchError`."""
        await self.compare(member)
        if self.adapters:
            await self.load_adapters(member)
        return await self._weights_problem(member)

    async def _weights_problem(self, member: Member) -> str:
        """Why a member must not serve with the weights that it has; empty if it may. Raises `EngineError`.

        Weights that a server does not report count as those of the fleet while it serves, and not when it comes back.
        """
        version = await served_weight_version(member.engine)
        is_unknown = version is None and member.state is MemberState.READY
        if self.version is None or version == self.version or is_unknown:
            return ""
        is_updated = member.state is MemberState.READY and self._updates > 0
        if is_updated or member.state is MemberState.DRAINING:  # an update or a drain has begun since the check did
            return ""
        if self._directory is not None:
            self._begin_to_catch_up(member, self._directory, self.version)
        served = "unknown weights" if version is None else f"the weights {version!r}"
        return f"it serves {served}, the fleet {self.version!r}; update it, then it is admitted"

    def _begin_to_catch_up(self, member: Member, directory: str | os.PathLike[str], version: str) -> None:
        """Load the fleet's weights into a member, unless that runs, or has failed a short time ago."""
        earlier = self._catching_up.get(member.name)
        attempts = 1
        if earlier is not None:
            attempts += earlier.attempts
            delay = min(_LONGEST_CATCH_UP_DELAY, self._limits.check_seconds * 2.0 ** (earlier.attempts - 1))
            if not earlier.task.done() or asyncio.get_running_loop().time() < earlier.ended_at + delay:
                return
        task = asyncio.create_task(self._catch_up(member, directory, version))
        catch_up = self._catching_up[member.name] = _CatchUp(task, attempts)
        task.add_done_callback(lambda done: setattr(catch_up, "ended_at", done.get_loop().time()))

    async def load_adapters(self, member: Member) -> None:
        """Load the adapters of the fleet that a member lacks. Raises `WeightUpdateError`, `EngineError`."""
        engine: Any = member.engine
        present = await engine.adapters()
        for name, directory in list(self.adapters.items()):
            if name not in present:
                await engine.load_adapter(name, directory)

    async def compare(self, member: Member) -> None:
        """Compare what a member serves with what the others do. Raises `FleetMismatchError`, `EngineError`."""
        capabilities = getattr(member.engine, "capabilities", None)
        if capabilities is None or (found := await capabilities()) is member.compared:
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
        engine: Any = member.engine
        try:
            await engine.update_weights(directory, version)
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
        asked: Collection[str] | None = None,
    ) -> None:
        """The members serve `version` from now on, except for those that failed, which are ejected.

        So are those that serve and are not in `asked`: they were added, or have come back, while the others loaded the
        weights. None stands for all.
        """
        reasons = {name: str(error) for name, error in failed.items()}
        self.version, self._directory = version, directory
        self._catching_up = {name: each for name, each in self._catching_up.items() if not each.task.done()}
        if asked is not None:
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
        for task in (self._monitor, *(catch_up.task for catch_up in self._catching_up.values())):
            if task is not None:
                task.cancel()
        self._monitor, self._catching_up = None, {}


def checked_engine(engine: Engine) -> Engine:
    if isinstance(engine, type) or not callable(getattr(engine, "generate", None)):
        raise ArgumentError("engine", engine, "pass an Engine, such as VLLMEngine(url)")
    return engine
