"""The rows that a batch goes on without, each with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from renderers.errors import MediaError
from rollouts.errors import (
    BatchError,
    PixelFormError,
    PixelMismatchError,
    SampleError,
    TrajectoryError,
    exception_text,
    short_repr,
)
from rollouts.training.samples import TrainingSample

T = TypeVar("T")

#: The errors of one row. Any other error, such as a missing processor, concerns every row, and is raised.
ROW_ERRORS = (SampleError, TrajectoryError, PixelMismatchError, PixelFormError, MediaError)


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A row that was left out: its name, the `kind` that it is counted under, and the reason."""

    name: str
    kind: str
    reason: str


class Quarantine:
    """Collects rows that cannot be trained, so that a batch goes on without them and reports how many they are.

        quarantine = Quarantine()
        samples = quarantine.collect(episodes, make_samples)
        quarantine.summary()  # '1 of 64 rows left out: 1 SampleError (e7: sample e7/3: token 4 is trained and its ...)'

    `rows` has the rows that were left out; `seen` is the number of rows in all: samples that were made, and items of
    which none could be made.
    """

    def __init__(self) -> None:
        self.rows: list[QuarantinedRow] = []
        self.seen = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows left out of each kind, the most frequent first."""
        return dict(Counter(row.kind for row in self.rows).most_common())

    def collect(
        self, items: Iterable[T], make: Callable[[T], TrainingSample | Sequence[TrainingSample]]
    ) -> list[TrainingSample]:
        """The samples that `make` makes of the items; an item for which it raises one of `ROW_ERRORS` is left out.

        Raises `BatchError` if every item was left out, and whatever else `make` raises.
        """
        samples: list[TrainingSample] = []
        before, offered = len(self.rows), 0
        for item in items:
            offered += 1
            try:
                made = make(item)
            except ROW_ERRORS as error:
                self.seen += 1
                self.leave_out(_name_of(item, error), type(error).__name__, exception_text(error))
            else:
                new = [made] if isinstance(made, TrainingSample) else list(made)
                self.seen += len(new)
                samples += new
        if offered and len(self.rows) - before == offered:
            raise BatchError(f"no row is left for the batch: {self.summary()}")
        return samples

    def leave_out(self, name: str, kind: str, reason: str) -> None:
        """Record a row that is in `seen`, such as a sample of `collect` that is too long."""
        self.rows.append(QuarantinedRow(name, kind, reason))

    def summary(self, examples: int = 3) -> str:
        """The counts, and the reasons of the first `examples` rows."""
        if not self.rows:
            return f"0 of {self.seen} rows left out"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        reasons = "; ".join(f"{row.name:.80}: {row.reason:.200}" for row in self.rows[:examples])
        more = f"; and {len(self.rows) - examples} more" if len(self.rows) > examples else ""
        return f"{len(self.rows)} of {self.seen} rows left out: {kinds} ({reasons}{more})"


def _name_of(item: Any, error: Exception) -> str:
    for owner, attribute in ((error, "sample"), (item, "episode_id"), (item, "name")):
        if isinstance(name := getattr(owner, attribute, None), str):
            return name
    return short_repr(item)
