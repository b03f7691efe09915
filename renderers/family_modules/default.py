"""The renderer class of `renderers.default` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import DefaultRenderer

__all__ = ["DefaultRenderer"]
