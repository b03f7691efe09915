"""The renderer class of `renderers.qwen36` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import Qwen36Renderer

__all__ = ["Qwen36Renderer"]
