"""Environments: scored prompts, tools, MCP servers, simulated users, Gymnasium; those of other libraries."""

from rollouts.environments.gymnasium import GymnasiumEnvironment
from rollouts.environments.mcp import HttpServer, McpTools, StdioServer
from rollouts.environments.scored_prompt import ScoredPrompt, messages_of_row
from rollouts.environments.tools import Tool, ToolEnvironment, ToolFailedError
from rollouts.environments.user_simulation import UserSimulation

__all__ = [
    "GymnasiumEnvironment",
    "HttpServer",
    "McpTools",
    "ScoredPrompt",
    "StdioServer",
    "Tool",
    "ToolEnvironment",
    "ToolFailedError",
    "UserSimulation",
    "messages_of_row",
]
