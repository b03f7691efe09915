"""Environments of verifiers, sampled from an `Engine`: a verifiers client, and episodes as `Trajectory`s.

verifiers runs its own harnesses, tools and scoring. Every call of the model goes through the renderer and the engine,
and each rollout is recorded as the exact token tree. Needs the extra `verifiers` (verifiers 0.4).
"""

from importlib.metadata import version

from rollouts.errors import MissingExtraError, UnsupportedVersionError

try:
    import verifiers.v1  # noqa: F401
except ImportError as error:
    raise MissingExtraError("rollouts.environments.verifiers", "verifiers", "verifiers 0.4") from error

try:
    from rollouts.environments.verifiers.client import EngineClient, EngineClientConfig
    from rollouts.environments.verifiers.episodes import run_verifiers_episodes
except ImportError as error:
    if not (error.name or "").startswith("verifiers"):
        raise
    raise UnsupportedVersionError(
        "rollouts.environments.verifiers", "verifiers", version("verifiers"), "0.4", str(error)
    ) from error

__all__ = ["EngineClient", "EngineClientConfig", "run_verifiers_episodes"]
