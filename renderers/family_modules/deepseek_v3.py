"""The renderer class of `renderers.deepseek_v3` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import DeepSeekV3Renderer

__all__ = ["DeepSeekV3Renderer"]
