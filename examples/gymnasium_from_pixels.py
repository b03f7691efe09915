"""FrozenLake of Gymnasium, played from its frames: groups of episodes of one lake each, as a record file.

    python examples/gymnasium_from_pixels.py [--tasks N] [--out lake.mmr]
    python examples/gymnasium_from_pixels.py --model DIR --base-url http://127.0.0.1:8000

The first form needs no model: a script walks at random. The second plays with a vLLM server that serves DIR. Both need
`pip install -e ".[gym]"`. The file can be read with `rollouts traj ls lake.mmr`, and
`rollouts view lake.mmr` shows its frames.
"""

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from renderers import load_renderer
from rollouts import SamplingParams, VLLMEngine
from rollouts.environments import GymnasiumEnvironment
from rollouts.episodes.limits import EpisodeLimits
from rollouts.rewards import GroupReward, rank_by
from rollouts.runner import Runner, Task
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl
from transport import RecordWriter

DIRECTIONS = ["left", "down", "right", "up"]


def make_environment(task):
    """The lake of the task; all episodes of its group walk on the same one."""

    def make():
        lake = generate_random_map(size=4, p=0.9, seed=task.data["map"])
        return gymnasium.make("FrozenLake-v1", render_mode="rgb_array", desc=lake, is_slippery=False)

    return GymnasiumEnvironment(
        make,
        instructions="You are the elf. Walk over the ice to the gift; do not step into a hole.",
        action_names=DIRECTIONS,
        invalid_action_reward=-0.1,
    )


def random_walk(request):
    """A completion without a model; its seed is that of the turn."""
    return random.Random(request.sampling.seed).choice([*DIRECTIONS, "I do not know"])  # noqa: S311  not a secret


#: Among episodes of one lake with equal rewards, the shorter one is better.
RANK = GroupReward("rank", 0.1, rank_by(lambda episode: (episode.reward, -episode.num_turns)))


async def play(engine, renderer, *, tasks, out):
    groups = []
    with RecordWriter(out) as writer:
        async with Runner(
            make_environment,
            engine,
            renderer,
            sampling=SamplingParams(max_tokens=256, temperature=1.0),
            group_size=8,
            limits=EpisodeLimits(max_turns=12),
            group_rewards=[RANK],
        ) as runner:
            async for group in runner.stream(Task(f"lake-{number}", {"map": number}) for number in range(tasks)):
                for episode in group.episodes:
                    writer.append(episode)
                groups.append(group)
                turns = [episode.num_turns for episode in group.episodes]
                frames = sum(1 for episode in group.episodes for _ in episode.all_media())
                print(
                    f"{group.task.task_id}: rewards {np.round(group.rewards, 2).tolist()}, turns {turns}, "
                    f"{frames} frames, {group.num_failed} failed"
                )
    return groups


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=4, help="lakes, each played by a group of 8 episodes")
    parser.add_argument("--out", type=Path, default=Path("lake.mmr"), help="the record file")
    parser.add_argument("--model", type=Path, help="checkpoint directory, with --base-url that of the server")
    parser.add_argument("--base-url", help="a vLLM server to sample from")
    options = parser.parse_args(arguments)
    if options.base_url and not options.model:
        parser.error("--base-url needs --model, the directory that the server has loaded")
    with tempfile.TemporaryDirectory() as temporary:
        renderer = load_renderer(options.model or tiny_qwen3_vl(temporary, weights=False))
        engine = VLLMEngine(options.base_url) if options.base_url else ScriptedEngine(random_walk, renderer=renderer)
        return asyncio.run(play(engine, renderer, tasks=options.tasks, out=options.out))


if __name__ == "__main__":
    main()
