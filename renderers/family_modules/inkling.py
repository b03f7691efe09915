"""The renderer class of `renderers.inkling` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import InklingRenderer

__all__ = ["InklingRenderer"]
