"""Environments: prompts with a scoring function, tools, Gymnasium; those of other libraries against an `Engine`."""

from rollouts.environments.gymnasium import GymnasiumEnvironment
from rollouts.environments.scored_prompt import ScoredPrompt
from rollouts.environments.tools import Tool, ToolEnvironment

__all__ = ["GymnasiumEnvironment", "ScoredPrompt", "Tool", "ToolEnvironment"]
