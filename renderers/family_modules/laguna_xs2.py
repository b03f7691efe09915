"""The renderer classes of `renderers.laguna_xs2` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import LagunaM1Renderer, LagunaXS2Renderer, LagunaXS21Renderer

__all__ = ["LagunaM1Renderer", "LagunaXS2Renderer", "LagunaXS21Renderer"]
