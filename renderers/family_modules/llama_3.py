"""The renderer class of `renderers.llama_3` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import Llama3Renderer

__all__ = ["Llama3Renderer"]
