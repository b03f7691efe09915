"""The renderer class of `renderers.qwen38` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import Qwen38Renderer

__all__ = ["Qwen38Renderer"]
