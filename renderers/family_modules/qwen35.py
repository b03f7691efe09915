"""The renderer class of `renderers.qwen35` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import Qwen35Renderer

__all__ = ["Qwen35Renderer"]
