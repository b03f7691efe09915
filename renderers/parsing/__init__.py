"""Sampled ids -> content, reasoning and tool calls."""
