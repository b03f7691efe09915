"""Messages between an orchestrator and its workers, besides `EpisodeJob`, `EpisodeOutcome` and `Progress`.

A worker sends `WorkerHello` first. Then it sends lists of `Progress`, and for each job an `Announced` and its
`EpisodeOutcome`, or a `JobFailed`. The orchestrator sends for each job an `Announced` and the `EpisodeJob`, and the
other messages. Each job has a number of its own, by which all messages name it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from rollouts.engines.protocol import InFlight
from rollouts.errors import ArgumentError, short_repr
from rollouts.values import check_choice, whole_number
from rollouts.workers.episode_worker import EpisodeFailure
from transport import wire_type

#: Slots of a worker. An integer of any size could not be added to metrics, which are floats.
_MOST_SLOTS: Final = 1_000_000
#: Of each text of a greeting, which is kept as long as the worker is connected.
_MOST_CHARACTERS: Final = 1_000


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
            text = getattr(self, name)
            if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
                rule = f"pass text of at most {_MOST_CHARACTERS:,} characters"
                raise ArgumentError(f"WorkerHello.{name}", short_repr(text), rule)
        if not 1 <= (whole_number(self.slots) or 0) <= _MOST_SLOTS:
            raise ArgumentError("WorkerHello.slots", self.slots, f"pass an integer from 1 to {_MOST_SLOTS:,}")


@wire_type("rollouts.Announced")
@dataclass(frozen=True, slots=True)
class Announced:
    """The next message is this job or its outcome: a receiver that cannot decode it knows the number."""

    job: int

    def __post_init__(self) -> None:
        _check_job(self)


@wire_type("rollouts.CancelJob")
@dataclass(frozen=True, slots=True)
class CancelJob:
    """The orchestrator does not wait for a job any more."""

    job: int

    def __post_init__(self) -> None:
        _check_job(self)


@wire_type("rollouts.JobFailed")
@dataclass(frozen=True, slots=True)
class JobFailed:
    """A job could not be decoded by the worker, or its outcome could not be sent."""

    job: int
    failure: EpisodeFailure

    def __post_init__(self) -> None:
        _check_job(self)
        if not isinstance(self.failure, EpisodeFailure):
            raise ArgumentError("JobFailed.failure", self.failure, "pass an EpisodeFailure")


@wire_type("rollouts.SetUpdate")
@dataclass(frozen=True, slots=True)
class SetUpdate:
    """An update of the weights begins, or has ended (None): `Workers.set_update`."""

    in_flight: InFlight | None

    def __post_init__(self) -> None:
        if self.in_flight is not None:
            check_choice("SetUpdate.in_flight", self.in_flight, InFlight)


@wire_type("rollouts.RunEnded")
@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is over: the worker may end."""


@wire_type("rollouts.WorkerLeaves")
@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """The worker ends on request, not by a failure: its jobs run again on others, and are not counted as lost."""


def _check_job(message: Announced | CancelJob | JobFailed) -> None:
    if whole_number(message.job) is None:
        raise ArgumentError(f"{type(message).__name__}.job", message.job, "pass an integer")


def own_version() -> str:
    """The version of mmrollouts that this process runs; empty where it is not installed."""
    try:
        return version("mmrollouts")
    except PackageNotFoundError:
        return ""
