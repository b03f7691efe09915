"""What a renderer is made with: options, the family whose rules hold, and the typed configuration, if there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from renderers.errors import ConfigError
from renderers.options import RendererOptions

if TYPE_CHECKING:
    from renderers.configs import BaseRendererConfig


class Settings(NamedTuple):
    """The options of a renderer; the family that they stand for, None for options that the caller has given.

    `config` is the resolved typed configuration that the options were made of, if there is one. `custom_class` is the
    class of another package that a `CustomRendererConfig` names; it builds itself.
    """

    options: RendererOptions
    family: str | None = None
    config: BaseRendererConfig | None = None
    custom_class: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls, model: str, config: RendererOptions | BaseRendererConfig | None, variables: Mapping[str, Any] | None
    ) -> Settings:
        """The settings that a configuration means for a model; None is `RendererOptions()`."""
        if config is None or isinstance(config, RendererOptions):
            options = config or RendererOptions()
            if variables:
                options = replace(options, chat_template_kwargs={**options.chat_template_kwargs, **variables})
            return cls(options)
        # Imported here: pydantic would take a third of the time of `import renderers`.
        from renderers.configs import (
            BaseRendererConfig,
            CustomRendererConfig,
            custom_renderer_config,
            load_custom_renderer,
        )
        from renderers.family_options import options_of, resolve_config

        if not isinstance(config, BaseRendererConfig):
            raise ConfigError("config", config, ("RendererOptions", "a configuration of renderers.configs", "None"))
        resolved = resolve_config(model, config, variables)
        if isinstance(resolved, CustomRendererConfig):
            own_config = custom_renderer_config(resolved)
            return cls(RendererOptions(), None, own_config, load_custom_renderer(resolved.import_path))
        return cls(options_of(resolved), resolved.name, resolved)
