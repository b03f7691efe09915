"""The renderer classes of `renderers.glm5` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import GLM5Renderer, GLM51Renderer, GLM53Renderer

__all__ = ["GLM5Renderer", "GLM51Renderer", "GLM53Renderer"]
