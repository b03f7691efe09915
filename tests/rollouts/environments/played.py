"""Episodes of environments with scripted completions."""

import asyncio

from rollouts import SamplingParams, run_episode
from rollouts.testing import ScriptedEngine

PROMPT = [{"role": "user", "content": "?"}]


def play(environment, script, renderer, *, seed=0, max_turns=50):
    """The trajectory of one episode, and the engine with the requests that it received."""
    engine = ScriptedEngine(script, renderer=renderer)
    trajectory = asyncio.run(
        run_episode(
            environment,
            engine=engine,
            renderer=renderer,
            sampling=SamplingParams(max_tokens=1000),
            max_turns=max_turns,
            seed=seed,
        )
    )
    return trajectory, engine
