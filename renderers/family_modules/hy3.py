"""The renderer class of `renderers.hy3` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import Hy3Renderer

__all__ = ["Hy3Renderer"]
