"""A tool is a function that the model calls through the environment of tools."""

from rollouts.environments.tools.errors import (
    ToolArgumentsError,
    ToolFailedError,
    ToolResultError,
    ToolUnavailableError,
)
from rollouts.environments.tools.tool import Tool
from rollouts.environments.tools.tool_environment import ToolEnvironment

__all__ = [
    "Tool",
    "ToolArgumentsError",
    "ToolEnvironment",
    "ToolFailedError",
    "ToolResultError",
    "ToolUnavailableError",
]
