"""Environments of verifiers, sampled from an `Engine`: a verifiers client, and episodes as `Trajectory`s.

verifiers runs its own harnesses, tools and scoring. Every call of the model goes through the renderer and the engine,
and each rollout is recorded as the exact token tree. Needs verifiers 0.4, which docs/migrating-from-renderers.md says
how to install: it requires a distribution `renderers` whose place this project takes, and no index has that.
"""

from importlib.metadata import version

_RULE = (
    "rollouts.environments.verifiers needs verifiers 0.4, and {} is installed ({}); "
    "install verifiers 0.4 as docs/migrating-from-renderers.md says"
)

try:
    import verifiers.v1  # noqa: F401
except ImportError as error:
    raise ImportError(_RULE.format("none", error)) from error

try:
    from rollouts.environments.verifiers.client import EngineClient, EngineClientConfig
    from rollouts.environments.verifiers.episodes import VerifiersTasks, run_verifiers_episodes
    from rollouts.environments.verifiers.workers import VerifiersWorkers
except ImportError as error:
    if not (error.name or "").startswith("verifiers"):
        raise
    raise ImportError(_RULE.format(version("verifiers"), error)) from error

__all__ = ["EngineClient", "EngineClientConfig", "VerifiersTasks", "VerifiersWorkers", "run_verifiers_episodes"]
