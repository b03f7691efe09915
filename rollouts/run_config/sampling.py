"""Checks the sampling options of a run against its engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollouts.engines.protocol import GenerateRequest, SamplingParams
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.errors import ConfigProblem, KeyPath, RunConfigError
from rollouts.run_config.problem_texts import key_text
from rollouts.run_config.sections import LocalEngineSection, ScriptedEngineSection


def check_sampling(file: ConfigFile) -> None:
    """Raise `RunConfigError` for options with which the engine would refuse every request of the run."""
    problems = [ConfigProblem(key_text(key), reason) for key, reason in _violations(file)]
    if problems:
        raise RunConfigError(file.path, problems)


def _violations(file: ConfigFile) -> Iterator[tuple[KeyPath, str]]:
    engine, sampling = file.config.engine, file.config.sampling
    if isinstance(engine, ScriptedEngineSection):  # it takes any
        return
    if isinstance(engine, LocalEngineSection):
        for name in sampling.extra:
            yield ("sampling", "extra", name), 'an engine of kind "local" has no further options; remove it'
        return
    from rollouts.engines.vllm.checks.sampling_checks import sampling_violations

    options: dict[KeyPath, dict[str, Any]] = {("sampling", "temperature"): {"temperature": sampling.temperature}}
    options |= {("sampling", "extra", name): {"extra": {name: value}} for name, value in sampling.extra.items()}
    for key, option in options.items():
        request = GenerateRequest([0], SamplingParams(max_tokens=sampling.max_tokens, **option))
        for reason in sampling_violations(request, vocab_size=None):
            yield key, reason
