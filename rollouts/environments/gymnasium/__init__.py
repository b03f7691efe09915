"""The model sees the frames of an environment of Gymnasium, and an action is read from what it writes."""

from rollouts.environments.gymnasium.environment import GymnasiumEnvironment

__all__ = ["GymnasiumEnvironment"]
