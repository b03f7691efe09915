"""From the typed configuration of a family to the options of a renderer."""

from collections.abc import Mapping
from typing import Any

from renderers.configs import (
    AutoRendererConfig,
    BaseRendererConfig,
    CustomRendererConfig,
    DeepSeekV4RendererConfig,
    GptOssRendererConfig,
    Llama3RendererConfig,
    config_class,
    load_custom_renderer,
)
from renderers.model_families import DEFAULT_FAMILY, MODEL_RENDERER_MAP
from renderers.options import RendererOptions


def template_field_names(config: BaseRendererConfig) -> frozenset[str]:
    """The variables of the chat template that a configuration accepts."""
    return _fields_class(config).template_field_names()


def merge_chat_template_kwargs(config: BaseRendererConfig, variables: Mapping[str, Any] | None) -> BaseRendererConfig:
    """The configuration with template variables added. Raises `ValueError` for one of no such family."""
    if not variables:
        return config
    fields = _fields_class(config)
    allowed = fields.template_field_names()
    any_name = fields._allow_opaque_template_kwargs
    wrong = sorted(set(variables) & fields.internal_field_names() if any_name else set(variables) - allowed)
    if wrong:
        names = "any variable of the template" if any_name else ", ".join(sorted(allowed)) or "none"
        raise ValueError(
            f"Unsupported chat_template_kwargs for {config.name!r}: {wrong}; allowed: {names}. Other "
            "options are fields of the configuration."
        )
    fields_set = config.model_dump(exclude_unset=True)
    return type(config).model_validate({**fields_set, **variables, "name": config.name})


def resolve_config(
    model: str, config: BaseRendererConfig, variables: Mapping[str, Any] | None = None
) -> BaseRendererConfig:
    """The configuration of a family, with template variables added.

    `AutoRendererConfig` becomes the configuration of the family that `MODEL_RENDERER_MAP` has for `model`. A
    model that is not listed gets `DefaultRendererConfig`: its own template decides.
    """
    if isinstance(config, AutoRendererConfig):
        family = config_class(MODEL_RENDERER_MAP.get(model, DEFAULT_FAMILY))
        config = family.model_validate(config.model_dump(exclude_unset=True, exclude={"name"}))
    return merge_chat_template_kwargs(config, variables)


def options_of(config: BaseRendererConfig) -> RendererOptions:
    """The options that a resolved configuration stands for.

    Template variables are those that are set; the others are left to the template, whose defaults they are.
    """
    if isinstance(config, GptOssRendererConfig) and (
        not config.use_system_prompt or config.knowledge_cutoff is not None
    ):
        raise ValueError(
            "use_system_prompt=False and knowledge_cutoff change what the model's template prints; pass the "
            "changed template as RendererOptions(chat_template=...)"
        )
    variables = {
        name: value
        for name, value in config.model_dump(exclude={"name", "thinking_retention"}).items()
        if _is_template_variable(config, name) and value is not None
    }
    if isinstance(config, DeepSeekV4RendererConfig) and "reasoning_effort" in variables:
        variables["release"] = "0731"  # whose efforts this configuration names; earlier checkpoints have other texts
    return RendererOptions(
        chat_template_kwargs=variables,
        thinking_retention=config.resolved_retention(),
    )


def _is_template_variable(config: BaseRendererConfig, name: str) -> bool:
    if name in config.internal_field_names():
        # The template has this one under the same name, although it is not one of its documented variables.
        return isinstance(config, GptOssRendererConfig) and name == "model_identity"
    # The date is always passed: a template that prints today's date would print other tokens tomorrow.
    return name in config.model_fields_set or (isinstance(config, Llama3RendererConfig) and name == "date_string")


def _fields_class(config: BaseRendererConfig) -> type[BaseRendererConfig]:
    if isinstance(config, CustomRendererConfig):
        fields: type[BaseRendererConfig] = load_custom_renderer(config.import_path).config_class
        return fields
    return type(config)
