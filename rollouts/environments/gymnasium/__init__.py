"""Environments of Gymnasium, whose rendered frames the model sees. Needs the extra `gym` when an episode begins."""

from rollouts.environments.gymnasium.actions import describe_actions, parse_action
from rollouts.environments.gymnasium.errors import GymnasiumError, InvalidActionError
from rollouts.environments.gymnasium.gymnasium_environment import GymnasiumEnvironment

__all__ = ["GymnasiumEnvironment", "GymnasiumError", "InvalidActionError", "describe_actions", "parse_action"]
