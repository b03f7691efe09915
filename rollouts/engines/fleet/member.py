"""One engine of a fleet: its state, the requests that are in flight at it, and what the fleet asks of it."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from rollouts.engines.event_loop import expire
from rollouts.engines.protocol import Engine, check_engine


class MemberState(StrEnum):
    """Whether a member is given requests.

    NEW: not checked yet. READY: it serves. EJECTED: it failed, and is checked until it serves again.
    DRAINING: it finishes what it has and is given nothing more.
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
    #: Its capabilities when its model was compared with that of the others; None for an engine that has not
    #: started.
    compared: object = None
    #: The timeouts around the requests in flight, which `interrupt` lets expire.
    interrupts: set[asyncio.Timeout] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # no request is in flight
    ejected: asyncio.Event = field(default_factory=asyncio.Event)  # the next ejection, which replaces it

    def __post_init__(self) -> None:
        check_engine(self.engine, allows_chat=False)
        self.begin_loop()

    def begin_loop(self) -> None:
        """Requests and waits of an event loop before have ended with it."""
        self.in_flight = 0
        self.interrupts.clear()
        self.idle, self.ejected = asyncio.Event(), asyncio.Event()
        self.idle.set()

    @property
    def servers(self) -> tuple[str, ...]:
        """The address of its server, without credentials; empty for an engine that has none."""
        return (self.engine.base_url,) if self.engine.base_url else ()

    def status(self) -> MemberStatus:
        return MemberStatus(self.name, self.state, self.reason, self.in_flight, self.engine.weight_version)

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
        expire(self.interrupts)
