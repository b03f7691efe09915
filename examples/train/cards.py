"""Blackjack of Gymnasium in text. Shown at first: play at random, so that the model knows the words, not the game."""

import asyncio

import gymnasium
import numpy as np

from rollouts import Task
from rollouts.environments import GymnasiumEnvironment

ACTIONS = ["stick", "hit"]


def tasks(first=0, count=1000):
    return [Task(f"deal {seed}", seed=seed) for seed in range(first, first + count)]


def conversations():
    return [Task(f"deal {seed}", {"messages": asyncio.run(at_random(seed))}) for seed in range(10_000, 10_100)]


async def at_random(seed):
    game = GymnasiumEnvironment(lambda: gymnasium.make("Blackjack-v1"), action_names=ACTIONS, observation="text")
    messages, order, done = await game.reset(seed), np.random.default_rng(seed), False
    while not done:
        messages.append({"role": "assistant", "content": ACTIONS[order.integers(2)]})
        result = await game.step(messages[-1])
        messages, done = [*messages, *result.messages], result.done
    await game.close()
    return messages
