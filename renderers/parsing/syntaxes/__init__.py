"""The syntaxes of tool calls, by how they write arguments: as JSON, as elements, as literals."""
