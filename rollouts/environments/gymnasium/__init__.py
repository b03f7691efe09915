"""Environments of Gymnasium: the model sees their frames, and an action is read from what it writes."""

from rollouts.environments.gymnasium.environment import GymnasiumEnvironment

__all__ = ["GymnasiumEnvironment"]
