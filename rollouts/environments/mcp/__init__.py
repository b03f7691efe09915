"""The model calls the tools of servers of the Model Context Protocol (MCP). Needs the extra `mcp`."""
