"""Episodes run against inference engines, and become trajectories and training batches."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Read, not imported: the other distribution's package may fail on a dependency of its own before anyone can ask it.
_spec = find_spec("renderers")
if (
    _spec is not None
    and _spec.origin
    and '__distribution__ = "mmrollouts"' not in Path(_spec.origin).read_text("utf-8")
):
    raise ImportError(
        f"the package `renderers` at {_spec.origin} belongs to another distribution and overwrote that of mmrollouts. "
        "Run `pip uninstall -y renderers mmrollouts`, then install mmrollouts. For a program that requires the "
        "distribution renderers, such as verifiers, install the one of packaging/renderers with it, so that pip does "
        "not fetch the other again (docs/migrating-from-renderers.md)."
    )

from rollouts.engines.protocol import (  # noqa: E402  (only once `renderers` is known to be ours)
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    TopLogprobs,
    WeightSpan,
)
from rollouts.episodes.context import ChildEpisode, EpisodeContext, GeneratedTurn  # noqa: E402
from rollouts.episodes.environment import Environment, StepResult, ThreadedEnvironment  # noqa: E402
from rollouts.episodes.episode import (  # noqa: E402
    EpisodeSpec,
    run_episode,
    run_episodes,
)
from rollouts.episodes.errors import EpisodeError, EpisodesError  # noqa: E402
from rollouts.errors import RolloutsError  # noqa: E402
from rollouts.runner import EpisodeLimits, Group, RetryPolicy, Runner, Task  # noqa: E402
from rollouts.trajectory.media_reference import MediaReference  # noqa: E402
from rollouts.trajectory.packed_episodes import pack_episodes  # noqa: E402
from rollouts.trajectory.provenance import Provenance  # noqa: E402
from rollouts.trajectory.token_node import TokenNode  # noqa: E402
from rollouts.trajectory.tree import Trajectory  # noqa: E402
from rollouts.trajectory.turn import Turn  # noqa: E402

if TYPE_CHECKING:
    from rollouts.engines.local import LocalEngine
    from rollouts.engines.sglang import SGLangEngine
    from rollouts.engines.vllm import VLLMEngine

__all__ = [
    "ChildEpisode",
    "Completion",
    "Engine",
    "Environment",
    "EpisodeContext",
    "EpisodeError",
    "EpisodeLimits",
    "EpisodeSpec",
    "EpisodesError",
    "FinishReason",
    "GenerateRequest",
    "GenerateResult",
    "GeneratedTurn",
    "Group",
    "LocalEngine",
    "MediaReference",
    "Provenance",
    "RetryPolicy",
    "RolloutsError",
    "Runner",
    "SGLangEngine",
    "SamplingParams",
    "StepResult",
    "Task",
    "ThreadedEnvironment",
    "TokenNode",
    "TopLogprobs",
    "Trajectory",
    "Turn",
    "VLLMEngine",
    "WeightSpan",
    "pack_episodes",
    "run_episode",
    "run_episodes",
]
# Loaded when first used: one needs the extra `torch`, the other is not needed by an environment's process.
_LAZY = {
    "LocalEngine": "rollouts.engines.local",
    "SGLangEngine": "rollouts.engines.sglang",
    "VLLMEngine": "rollouts.engines.vllm",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
