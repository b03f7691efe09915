"""The messages between the two processes of the demonstration, sent as bytes of `transport.encode`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollouts.training.mismatch import MismatchReport
from rollouts.trajectory.tree import Trajectory
from transport import wire_type


@wire_type("rollouts.demo.WarmStart")
@dataclass(frozen=True, slots=True)
class WarmStart:
    """Request `steps` supervised optimizer steps."""

    steps: int


@wire_type("rollouts.demo.Learn")
@dataclass(frozen=True, slots=True)
class Learn:
    """Request one policy-gradient step on these episodes. `progress` in [0, 1): completed share of the run.

    `measure_after`: also measure the mismatch between the sampler and the weights after the step.
    """

    trajectories: list[Trajectory]
    progress: float
    measure_after: bool = False


@wire_type("rollouts.demo.Learned")
@dataclass(frozen=True, slots=True)
class Learned:
    """The weights after the step, by parameter name, and the measurements of the step.

    `mismatch`: between the sampler and the weights before the step, which sampled the episodes. `mismatch_after`, if
    requested: between the sampler and the weights after the step, on some of the episodes.
    """

    weights: dict[str, np.ndarray]
    loss: float
    mismatch: MismatchReport = field(default_factory=MismatchReport)
    mismatch_after: MismatchReport = field(default_factory=MismatchReport)
