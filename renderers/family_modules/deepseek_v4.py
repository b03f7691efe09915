"""The renderer class of `renderers.deepseek_v4` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import DeepSeekV4Renderer

__all__ = ["DeepSeekV4Renderer"]
