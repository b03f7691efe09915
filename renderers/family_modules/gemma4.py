"""The renderer class of `renderers.gemma4` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import Gemma4Renderer

__all__ = ["Gemma4Renderer"]
