"""The renderer class of `renderers.kimi_k2` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import KimiK2Renderer

__all__ = ["KimiK2Renderer"]
