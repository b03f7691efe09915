"""Messages between an orchestrator and its workers, besides `EpisodeJob`, `EpisodeOutcome` and `Progress`.

A worker sends `WorkerHello` first. Then it sends lists of `Progress`, and for each job an `Announced` and its
`EpisodeOutcome`. The orchestrator sends for each job an `Announced` and the `EpisodeJob`, and the other messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

from rollouts.engines.protocol import InFlight
from rollouts.errors import ArgumentError
from rollouts.numbers import whole_number
from transport import wire_type


@wire_type("rollouts.WorkerHello")
@dataclass(frozen=True, slots=True)
class WorkerHello:
    """A worker is there: the version of mmrollouts that it has, and how many episodes it runs at once.

    `configuration` identifies what its environments and its renderer are made of; empty where it is not known.
    """

    version: str
    slots: int
    configuration: str = ""

    def __post_init__(self) -> None:
        for name in ("version", "configuration"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(f"WorkerHello.{name}", getattr(self, name), "pass text")
        if (whole_number(self.slots) or 0) < 1:
            raise ArgumentError("WorkerHello.slots", self.slots, "pass an integer of at least 1")


@wire_type("rollouts.Announced")
@dataclass(frozen=True, slots=True)
class Announced:
    """The next message is the job or the outcome of this episode: a receiver that cannot decode it knows its id."""

    episode_id: str

    def __post_init__(self) -> None:
        if not isinstance(self.episode_id, str):
            raise ArgumentError("Announced.episode_id", self.episode_id, "pass text")


@wire_type("rollouts.CancelJob")
@dataclass(frozen=True, slots=True)
class CancelJob:
    """The orchestrator does not wait for an episode any more."""

    episode_id: str


@wire_type("rollouts.SetUpdate")
@dataclass(frozen=True, slots=True)
class SetUpdate:
    """An update of the weights begins, or has ended (None): `Workers.set_update`."""

    in_flight: InFlight | None

    def __post_init__(self) -> None:
        if self.in_flight is not None and self.in_flight not in get_args(InFlight):
            raise ArgumentError("SetUpdate.in_flight", self.in_flight, f"pass one of {', '.join(get_args(InFlight))}")


@wire_type("rollouts.RunEnded")
@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is over: the worker may end."""


@wire_type("rollouts.WorkerLeaves")
@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """The worker ends on request, not by a failure: its jobs run again on others, and are not counted as lost."""


def own_version() -> str:
    """The version of mmrollouts that this process runs; empty where it is not installed."""
    try:
        return version("mmrollouts")
    except PackageNotFoundError:
        return ""
