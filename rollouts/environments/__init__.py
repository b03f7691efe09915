"""Environments: scored prompts, tools, MCP servers, Gymnasium; those of other libraries."""

from rollouts.environments.gymnasium import GymnasiumEnvironment
from rollouts.environments.mcp import HttpServer, McpTools, StdioServer
from rollouts.environments.scored_prompt import ScoredPrompt, messages_of_row
from rollouts.environments.tools import Tool, ToolEnvironment, ToolFailedError

__all__ = [
    "GymnasiumEnvironment",
    "HttpServer",
    "McpTools",
    "ScoredPrompt",
    "StdioServer",
    "Tool",
    "ToolEnvironment",
    "ToolFailedError",
    "messages_of_row",
]
