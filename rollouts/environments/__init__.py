"""These environments are ready to use: scored prompts, tools, MCP servers, Gymnasium, verifiers."""

from rollouts.environments.gymnasium.environment import GymnasiumEnvironment
from rollouts.environments.mcp.servers import HttpServer, StdioServer
from rollouts.environments.mcp.tools import McpTools
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
