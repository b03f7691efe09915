"""The error of the adapters."""

from __future__ import annotations

from typing import Final

from rollouts.errors import RolloutsError
from rollouts.training.samples import TrainingSample

LEAVE_OUT: Final = "Leave the sample out (the `index` of this error)"


class AdapterError(RolloutsError):
    """A sample that a trainer's type cannot hold, or an object of such a type that no sample can be made of.

    `target` names the type, `row` the sample or the object, `part` the part of it that does not fit; `index`
    is the place of the sample in the list that was given, None where no single one is at fault.

    Cure: change the part of the sample that the text names, as the text says.
    """

    def __init__(self, target: str, row: str | TrainingSample, part: str, reason: str) -> None:
        self.target = target
        self.row = row if isinstance(row, str) else f"sample {row.name}"
        self.part = part
        self.index: int | None = None
        super().__init__(f"{target}: {self.row}: {part}: {reason}")
