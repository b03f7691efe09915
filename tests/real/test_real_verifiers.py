"""A verifiers environment with images over several turns, run by verifiers against a real vLLM.

python tests/dropin/verifiers_environment.py -m real tests/real/test_real_verifiers.py
"""

import sys
from pathlib import Path

import pytest

vf = pytest.importorskip("verifiers.v1")
sys.path.append(str(Path(__file__).parents[1] / "environments"))  # the taskset `colours-v1`

from test_real_episodes import mismatches  # noqa: E402

from renderers import load_renderer  # noqa: E402
from rollouts import Runner, SamplingParams, VLLMEngine  # noqa: E402
from rollouts.environments.verifiers import VerifiersTasks, VerifiersWorkers  # noqa: E402


def load_env(**options):
    return vf.load_environment(
        vf.resolve_env_config(
            {"taskset": {"id": "colours-v1", "options": options}, "agent": {"runtime": {"type": "subprocess"}}}
        )
    )


async def test_log_probabilities_of_verifiers_rollouts_are_those_of_transformers(vllm_server):
    renderer = load_renderer(vllm_server.model_dir)
    env = load_env()
    async with (
        VLLMEngine(vllm_server.base_url) as engine,
        VerifiersWorkers(env, engine, renderer) as workers,
        Runner(None, engine, None, sampling=SamplingParams(max_tokens=12), group_size=4, workers=workers) as runner,
    ):
        groups = [group async for group in runner.stream(VerifiersTasks(env))]
    trajectories = [episode for group in groups for episode in group.episodes]
    assert [trajectory.error for trajectory in trajectories] == [""] * 16
    assert {trajectory.num_turns for trajectory in trajectories} == {3}
    assert {trajectory.forks for trajectory in trajectories} == {0}
    assert all(len(trajectory.media(trajectory.turns[-1].node)) == 3 for trajectory in trajectories)
    reports = mismatches(trajectories, renderer, vllm_server.model_dir)
    assert sum(report.tokens for report in reports) > 16 * 3 * 4
    assert max(report.max_abs for report in reports) < 1e-4
