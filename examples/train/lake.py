"""What the model says at first on FrozenLake: each direction, so that it knows the words and not the way."""

import asyncio

import gymnasium

from rollouts import Task
from rollouts.environments import GymnasiumEnvironment

DIRECTIONS = ["left", "down", "right", "up"]


def tasks():
    return [Task(f"walk {seed}", seed=seed) for seed in range(64)]


def conversations():
    lake = GymnasiumEnvironment(
        lambda: gymnasium.make("FrozenLake-v1", is_slippery=False), action_names=DIRECTIONS, observation="text"
    )
    asked = asyncio.run(lake.reset(0))
    for name in DIRECTIONS:
        yield Task(name, {"messages": [*asked, {"role": "assistant", "content": name}]})
