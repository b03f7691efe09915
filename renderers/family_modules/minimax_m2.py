"""The renderer class of `renderers.minimax_m2` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import MiniMaxM2Renderer

__all__ = ["MiniMaxM2Renderer"]
