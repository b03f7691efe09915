"""Prompts, and tool declarations for templates, that a vendor prints with Python code."""

from renderers.formats.prompts.kimi_k25 import TypeScriptToolTemplate, reads_typescript
from renderers.formats.prompts.selection import prompt_for

__all__ = ["TypeScriptToolTemplate", "prompt_for", "reads_typescript"]
