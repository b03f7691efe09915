"""What a renderer is made with: options, the family whose rules hold, and the typed configuration, if there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from renderers.errors import ConfigError
from renderers.model_files import MODEL_RENDERER_MAP
from renderers.options import DEFAULT_FAMILY, RendererOptions, default_options
from renderers.parsing.format import Format

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
        if not isinstance(variables, Mapping | None):
            raise ConfigError("chat_template_kwargs", variables, ("a dict of variable to value", "None"))
        if config is None or isinstance(config, RendererOptions):
            options = config or RendererOptions()
            if variables:
                options = replace(options, chat_template_kwargs={**options.chat_template_kwargs, **variables})
            return cls(options)
        # Imported here: pydantic would take a third of the time of `import renderers`.
        from renderers.configs import BaseRendererConfig, CustomRendererConfig, custom_renderer_class
        from renderers.family_options import options_of, resolve_config

        if not isinstance(config, BaseRendererConfig):
            raise ConfigError("config", config, ("RendererOptions", "a configuration of renderers.configs", "None"))
        resolved = resolve_config(model, config, variables)
        if isinstance(resolved, CustomRendererConfig):
            renderer_class = custom_renderer_class(resolved.import_path)
            return cls(RendererOptions(), None, resolved.renderer_config(), renderer_class)
        return cls(options_of(resolved), resolved.name, resolved)

    @classmethod
    def of_tokenizer(
        cls, model: str, config: RendererOptions | BaseRendererConfig | None, variables: Mapping[str, Any] | None
    ) -> Settings:
        """As `of`, but None is `AutoRendererConfig()`, which is not made unless there are variables to check."""
        if config is not None:
            return cls.of(model, config, variables)
        if variables:
            from renderers.configs import AutoRendererConfig

            return cls.of(model, AutoRendererConfig(), variables)
        return cls.of_family(MODEL_RENDERER_MAP.get(model, DEFAULT_FAMILY))

    @classmethod
    def of_family(cls, family: str) -> Settings:
        """The settings of a family's configuration when none of its fields is set."""
        return cls(default_options(family), family)

    def overridden(self, chat_template: str | Path | None, format: Format | str | None) -> Settings:
        """These settings with the arguments of `load_renderer` that are not None."""
        options = self.options
        if chat_template is not None:
            options = replace(options, chat_template=chat_template)
        if format is not None:
            options = replace(options, format=format)
        return self._replace(options=options)
