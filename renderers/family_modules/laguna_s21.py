"""The renderer class of `renderers.laguna_s21` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import LagunaS21Renderer

__all__ = ["LagunaS21Renderer"]
