"""The model calls the tools of servers of the Model Context Protocol (MCP). Needs the extra `mcp`."""

from rollouts.environments.mcp.servers import HttpServer, StdioServer
from rollouts.environments.mcp.tools import McpTools

__all__ = ["HttpServer", "McpTools", "StdioServer"]
