"""A mismatch above a threshold as an error or as a warning."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

from rollouts.errors import ArgumentError, MismatchError
from rollouts.numbers import finite_number
from rollouts.training.mismatch.report import MismatchReport

Action = Literal["error", "warning"]


class MismatchWarning(UserWarning):
    """The mismatch is above a threshold."""


def check_mismatch(
    report: MismatchReport,
    *,
    max_abs: float | None = None,
    mean_abs: float | None = None,
    k3: float | None = None,
    action: Action = "error",
) -> None:
    """Compare figures of the report with thresholds in nats; None is no threshold.

    A figure above its threshold raises `MismatchError`, or with action="warning" warns with `MismatchWarning`. Either
    text names the figure, the threshold, the sample with the largest difference and the likely causes. Raises
    `ArgumentError` for a threshold that is not above 0, without any threshold, and for another action.
    """
    thresholds = {"max_abs": max_abs, "mean_abs": mean_abs, "k3": k3}
    given = {name: value for name, value in thresholds.items() if value is not None}
    if not given:
        raise ArgumentError("max_abs", max_abs, "pass at least one of max_abs, mean_abs and k3")
    for name, value in given.items():
        if (number := finite_number(value)) is None or number <= 0:
            raise ArgumentError(name, value, "pass a number of nats above 0")
    if action not in get_args(Action):
        raise ArgumentError("action", action, f"pass one of {', '.join(get_args(Action))}")
    figures = report.statistics._asdict()
    exceeded = [(name, figures[name], value) for name, value in given.items() if not figures[name] <= value]
    if not exceeded:
        return
    error = MismatchError(exceeded, report.tokens, report.worst, [str(likely.cause) for likely in report.likely_causes])
    if action == "error":
        raise error
    warnings.warn(str(error), MismatchWarning, stacklevel=2)
