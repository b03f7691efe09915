"""What the two processes of the demonstration say to each other, always as bytes of `transport.encode`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollouts.training.mismatch import MismatchReport
from rollouts.trajectory.tree import Trajectory
from transport import wire_type


@wire_type("rollouts.demo.WarmStart")
@dataclass(frozen=True, slots=True)
class WarmStart:
    """Make this many supervised steps."""

    steps: int


@wire_type("rollouts.demo.Learn")
@dataclass(frozen=True, slots=True)
class Learn:
    """Make one policy-gradient step on these episodes; `progress` in [0, 1) is how much of the run is behind.

    `measure_after`: also measure how far the sampler is from the weights after the step, until it gets them.
    """

    trajectories: list[Trajectory]
    progress: float
    measure_after: bool = False


@wire_type("rollouts.demo.Learned")
@dataclass(frozen=True, slots=True)
class Learned:
    """The weights after the step (by parameter name), and what the step saw.

    `mismatch` is that of the episodes to the weights before the step, which sampled them; `mismatch_after`, if asked
    for, that of some of them to the weights after it.
    """

    weights: dict[str, np.ndarray]
    loss: float
    mismatch: MismatchReport = MismatchReport()
    mismatch_after: MismatchReport = MismatchReport()
