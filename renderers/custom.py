"""Renderer classes of other packages, named by an import path in a `CustomRendererConfig`."""

from renderers.configs import custom_renderer_config, load_custom_renderer, load_target

__all__ = ["custom_renderer_config", "load_custom_renderer", "load_target"]
