"""The renderer class of `renderers.glm45` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import GLM45Renderer

__all__ = ["GLM45Renderer"]
