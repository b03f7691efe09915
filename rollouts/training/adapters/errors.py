"""The errors of the adapters."""

from __future__ import annotations

from rollouts.errors import RolloutsError


class AdapterError(RolloutsError):
    """A sample that a trainer's type cannot hold, or an object of such a type that no sample can be made of.

    `target` names the type, `row` the sample or the object, `part` the part of it that does not fit.

    Cure: change the part of the sample that the text names, as the text says.
    """

    def __init__(self, target: str, row: str, part: str, reason: str, cure: str) -> None:
        self.target = target
        self.row = row
        self.part = part
        self.reason = reason
        super().__init__(f"{target}: {row}: {part}: {reason}. {cure}")


class MissingTrainerError(RolloutsError, ImportError):
    """A trainer's package is not installed, or its module cannot be imported; the cause is chained.

    Cure: install the trainer's package, or pass the module that has its types as `types`.
    """

    def __init__(self, module: str, reason: str) -> None:
        self.module = module
        super().__init__(
            f"the module {module} cannot be imported ({reason}). Install the trainer's package, or pass the module "
            "that has its types as `types`"
        )
