"""Environments of verifiers, sampled from an `Engine`: a verifiers client, and episodes as `Trajectory`s.

verifiers runs its own harnesses, tools and scoring. Every call of the model goes through the renderer and the engine,
and each rollout is recorded as the exact token tree. Needs the extra `verifiers` (verifiers 0.4).
"""

from rollouts.errors import MissingExtraError

try:
    import verifiers.v1  # noqa: F401
except ImportError as error:
    raise MissingExtraError("rollouts.environments.verifiers", "verifiers", "verifiers 0.4") from error

from rollouts.environments.verifiers.client import EngineClient, EngineClientConfig
from rollouts.environments.verifiers.episodes import run_verifiers_episodes

__all__ = ["EngineClient", "EngineClientConfig", "run_verifiers_episodes"]
