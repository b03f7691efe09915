"""Environments of verifiers sample from an `Engine`, and their episodes are recorded as `Trajectory`s.

verifiers runs its own harnesses, tools and scoring. Every call of the model goes through the renderer and the
engine, and each rollout is recorded as the exact token tree. Needs verifiers 0.4, which
docs/migrating-from-renderers.md says how to install: it requires a distribution `renderers` whose place this
project takes, and no index has that.
"""

try:
    from rollouts.environments.verifiers.client import EngineClient, EngineClientConfig
    from rollouts.environments.verifiers.episodes import VerifiersTasks
    from rollouts.environments.verifiers.workers import VerifiersWorkers
except ImportError as error:
    if not (error.name or "").startswith("verifiers"):
        raise
    rule = "needs verifiers 0.4; install it as docs/migrating-from-renderers.md says"
    raise ImportError(f"rollouts.environments.verifiers {rule} ({error})") from error

__all__ = ["EngineClient", "EngineClientConfig", "VerifiersTasks", "VerifiersWorkers"]
