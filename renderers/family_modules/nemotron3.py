"""The renderer classes of `renderers.nemotron3` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import Nemotron3Renderer, Nemotron3UltraRenderer, Nemotron35Renderer

__all__ = ["Nemotron3Renderer", "Nemotron3UltraRenderer", "Nemotron35Renderer"]
