"""Prompts, and tool declarations for templates, that a vendor prints with Python code."""
