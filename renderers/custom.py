"""Renderer classes of other packages, named by the import path in a configuration (`CustomRendererConfig`)."""

from __future__ import annotations

from typing import Any

from renderers.configs import BaseRendererConfig, CustomRendererConfig, custom_renderer_class, load_target

__all__ = ["custom_renderer_config", "load_custom_renderer", "load_target"]


def load_custom_renderer(import_path: str) -> Any:
    """The renderer class of an import path. Raises `TypeError` if it has no `config_class`."""
    return custom_renderer_class(import_path)


def custom_renderer_config(config: CustomRendererConfig) -> BaseRendererConfig:
    """The configuration of the renderer's own class, made of the fields beside `name` and `import_path`."""
    return config.renderer_config()
