"""The renderer class of `renderers.deepseek_r1` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import DeepSeekR1Renderer

__all__ = ["DeepSeekR1Renderer"]
