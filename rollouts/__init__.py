"""Episodes against inference engines, trajectories, and the training batches made of them."""

import renderers
from rollouts.errors import ForeignRenderersError, RolloutsError

if getattr(renderers, "__distribution__", None) != "mmrollouts":
    raise ForeignRenderersError(str(getattr(renderers, "__file__", "an unknown place")))

from rollouts.engines.protocol import (
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    WeightSpan,
)
from rollouts.environment import Environment, StepResult, in_thread
from rollouts.episode import run_episode
from rollouts.trajectory import MediaReference, TokenNode, Trajectory, Turn

__all__ = [
    "Completion",
    "Engine",
    "Environment",
    "FinishReason",
    "ForeignRenderersError",
    "GenerateRequest",
    "GenerateResult",
    "MediaReference",
    "RolloutsError",
    "SamplingParams",
    "StepResult",
    "TokenNode",
    "Trajectory",
    "Turn",
    "WeightSpan",
    "in_thread",
    "run_episode",
]
