"""When groups of episodes start, and how old their tokens may be: synchronous, one step off-policy, asynchronous.

The staleness of a sample is the number of weight updates between the oldest weights that sampled one of its tokens and
the weights that are in use when it is delivered. A mode limits it twice: it lets few enough groups start ahead of the
consumer, and it says what happens to a sample that is too old all the same.
"""

from dataclasses import MISSING, dataclass
from typing import ClassVar, Literal, Protocol

from rollouts.values import Bounded, check_choice, whole_field

#: What happens to a group with tokens that are too old.
OnStale = Literal["drop", "downweight"]


@dataclass(frozen=True, slots=True)
class Demand:
    """How many groups the consumer of a runner wants.

    `waiting` is the number it waits for at the moment, 0 between two calls of `collect`; `batch` the number that it
    asked for at once most recently, 0 before the first call. Both are None for a stream, whose consumer wants all.
    """

    waiting: int | None = 0
    batch: int | None = 0


class Mode(Protocol):
    """What a runner asks its mode. Pure: the same arguments have the same answer."""

    @property
    def max_staleness(self) -> int:
        """The largest staleness that a sample may have."""

    @property
    def on_stale(self) -> OnStale:
        """What happens to a group with a sample that is staler."""

    def max_undelivered(self, demand: Demand) -> int | None:
        """How many groups may be running or finished and not delivered at once; None: as many as there is capacity for.

        At least `demand.waiting`, so that a consumer that waits is always served.
        """


@dataclass(frozen=True, slots=True)
class Synchronous:
    """Every sample is from the weights that are in use when it is delivered.

    `collect(n)` starts n groups, and none runs when it returns. Groups that are not delivered when the weights are
    updated are dropped and counted; only a stream, or a `collect` that runs during the update, has such groups.
    """

    max_staleness: ClassVar[int] = 0
    on_stale: ClassVar[OnStale] = "drop"

    def max_undelivered(self, demand: Demand) -> int | None:
        return demand.waiting


@dataclass(frozen=True, slots=True)
class OneStepOffPolicy:
    """The next batch is sampled while the trainer trains on the last one: a sample is stale by at most one update.

    After `collect(n)` returns, n further groups start; the next `collect` waits for those, and starts others only for
    groups that are skipped or dropped. So none is too old because its episodes are long, while others overtake it. A
    group that is older by more than one update is dropped and counted.
    """

    max_staleness: ClassVar[int] = 1
    on_stale: ClassVar[OnStale] = "drop"

    def max_undelivered(self, demand: Demand) -> int | None:
        if demand.waiting is None or demand.batch is None:
            return None
        return demand.waiting or demand.batch


@dataclass(frozen=True, slots=True)
class Asynchronous(Bounded):
    """Groups run all the time, while the trainer trains and while it waits.

    A sample is stale by at most `max_staleness` updates, counted from its oldest token. With `on_stale="drop"` a group
    with a staler episode is dropped and counted, also while it runs, so that its capacity is free for others. With
    "downweight" it is delivered, and the `sample_weights` of staler episodes are less than 1 (`sample_weight`).

    At most `max_staleness` batches run ahead of the consumer, because groups further ahead would be too old when their
    turn comes. A stream has no batches; as many groups run as there is capacity for. Raises `ArgumentError`.
    """

    max_staleness: int = whole_field(MISSING, least=0)
    on_stale: OnStale = "drop"

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        check_choice("on_stale", self.on_stale, OnStale)

    def max_undelivered(self, demand: Demand) -> int | None:
        if demand.waiting is None or demand.batch is None:
            return None
        return self.max_staleness * demand.batch + demand.waiting


def is_dropped(mode: Mode, staleness: int) -> bool:
    """Whether a group with a sample of this staleness is dropped."""
    return mode.on_stale == "drop" and staleness > mode.max_staleness


def sample_weight(mode: Mode, staleness: int) -> float:
    """The factor for the loss of a delivered sample: 1 up to the limit, then (limit + 1) / (staleness + 1)."""
    return min(1.0, (mode.max_staleness + 1) / (staleness + 1))
