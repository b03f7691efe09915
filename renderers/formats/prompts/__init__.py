"""Prompts whose text a vendor's Python code prints, and tool declarations that it hands to a template."""

from renderers.formats.prompts.kimi_k25 import TypeScriptToolTemplate, reads_typescript
from renderers.formats.prompts.selection import prompt_for

__all__ = ["TypeScriptToolTemplate", "prompt_for", "reads_typescript"]
