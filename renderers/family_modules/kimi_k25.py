"""The renderer class of `renderers.kimi_k25` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import KimiK25Renderer

__all__ = ["KimiK25Renderer"]
