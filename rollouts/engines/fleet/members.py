"""One engine of a fleet: its state, and the requests that are in flight at it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from rollouts.engines.protocol import Engine


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
    """The fleet's record of one engine. The fleet holds its lock while it changes one."""

    name: str
    engine: Engine
    state: MemberState = MemberState.NEW
    reason: str = "not checked yet"
    in_flight: int = 0
    failed_checks: int = 0
    passed_checks: int = 0
    is_compared: bool = False  # its model with those of the others; an engine that has not started cannot be
    #: The timeouts around the requests in flight, which `interrupt` lets expire, and their event loops.
    interrupts: set[tuple[asyncio.AbstractEventLoop, asyncio.Timeout]] = field(default_factory=set)
    idle_waits: list[Future[None]] = field(default_factory=list)
    ejection_waits: list[Future[None]] = field(default_factory=list)

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
        self.failed_checks = self.passed_checks = 0
        if state is MemberState.EJECTED:
            _settle(self.ejection_waits)

    def wait_until_ejected(self) -> Future[None]:
        """Done as soon as the member is ejected after this call."""
        ejected: Future[None] = Future()
        self.ejection_waits = [wait for wait in self.ejection_waits if not wait.done()] + [ejected]
        return ejected

    def wait_until_idle(self) -> Future[None]:
        """Done as soon as no request is in flight."""
        idle: Future[None] = Future()
        self.idle_waits.append(idle)
        self.settle_if_idle()
        return idle

    def settle_if_idle(self) -> None:
        if not self.in_flight:
            _settle(self.idle_waits)

    def interrupt(self) -> None:
        """End the requests in flight, on whichever event loops they run."""
        for loop, timeout in list(self.interrupts):
            if not loop.is_closed():
                loop.call_soon_threadsafe(_expire, timeout)


def _settle(waits: list[Future[None]]) -> None:
    """Let all that wait go on, except for those that were cancelled."""
    for wait in waits:
        if wait.set_running_or_notify_cancel():
            wait.set_result(None)
    waits.clear()


def _expire(timeout: asyncio.Timeout) -> None:
    with suppress(RuntimeError):  # the block has ended already
        timeout.reschedule(0.0)
