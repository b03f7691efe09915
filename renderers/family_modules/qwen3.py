"""The renderer class of `renderers.qwen3` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import Qwen3Renderer

__all__ = ["Qwen3Renderer"]
