"""`create_renderer`, and the renderer class of each model family by its name in PyPI's `renderers`.

A class stands for the name of a family, whose rules and defaults are in `renderers.options`; everything else
is `TemplateRenderer` for all of them. `module` is the module of that package that has the class, such as
`renderers.qwen3_vl`; a class without one is in the module of its base class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from renderers.errors import ConfigError
from renderers.loading import Settings, arguments_of_tokenizer, model_of_tokenizer
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.model_families import DEFAULT_FAMILY
from renderers.options import RendererOptions
from renderers.template_renderer import TemplateRenderer

if TYPE_CHECKING:
    from renderers.configs import BaseRendererConfig

_CLASSES: dict[str, type[FamilyRenderer]] = {}


def create_renderer(
    tokenizer: Any,
    config: RendererOptions | BaseRendererConfig | None = None,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    media_policy: MediaPolicy | None = None,
    media_store: MediaStore | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> Any:
    """Build a renderer from a tokenizer that is already loaded, with its chat template.

    `tokenizer` is a fast tokenizer of transformers, or a `ModelTokenizer` of `load_tokenizer`. `config` is
    the typed configuration of a family (`renderers.configs`), or `RendererOptions`; None means
    `AutoRendererConfig()`: the family that `MODEL_RENDERER_MAP` has for the model, else
    `DefaultRendererConfig()`. `chat_template_kwargs` are template variables, and unless `config` is
    `RendererOptions` only those that the family has. The result is a `FamilyRenderer`; for `RendererOptions`
    a `TemplateRenderer`; the class that a `CustomRendererConfig` names.

    For a multimodal model, `tokenizer.name_or_path` must be a directory with its preprocessor_config.json;
    else the renderer reads text only and raises `MessageError` for a medium. Raises a `LoadError` for a
    tokenizer without a `tokenizers` backend or without a template, `ConfigError` for the configuration of
    another family than the template's, `ValueError` for a template variable that the family does not have.
    """
    from renderers.configs import AutoRendererConfig  # pydantic would take a third of the time of `import renderers`

    settings = Settings.of(model_of_tokenizer(tokenizer), config or AutoRendererConfig(), chat_template_kwargs)
    if settings.custom_class is not None:
        return settings.custom_class(tokenizer, settings.config)
    media: dict[str, Any] = {"media_policy": media_policy, "media_store": media_store, "now": now}
    if settings.family is None:
        return TemplateRenderer(**arguments_of_tokenizer(tokenizer, settings, **media))
    return renderer_class(settings.family)(tokenizer, settings.config, **media)


def renderer_class(family: str) -> type[FamilyRenderer]:
    """The renderer class of a family, given as the `name` of its configuration."""
    return _CLASSES[family]


class FamilyRenderer(TemplateRenderer):
    """A `TemplateRenderer` with the rules of a family. Subclasses name the family; this class is of none.

    `config` is the family's configuration; None is its defaults. `processor`, a processor of transformers, is
    used in place of the one that the files of the tokenizer's directory describe. Raises what
    `create_renderer` raises.
    """

    family: ClassVar[str]
    module: ClassVar[str]

    def __init_subclass__(cls, *, family: str, module: str | None = None) -> None:
        super().__init_subclass__()
        cls.family = family
        cls.module = module or cls.module
        _CLASSES[family] = cls

    def __init__(
        self,
        tokenizer: Any,
        config: BaseRendererConfig | None = None,
        *,
        processor: Any = None,
        media_policy: MediaPolicy | None = None,
        media_store: MediaStore | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        from renderers.configs import config_class

        settings = Settings.of(model_of_tokenizer(tokenizer), config or config_class(self.family)(), None)
        if settings.family != self.family:
            raise ConfigError(
                f"config of {type(self).__name__}", config, (f"the configuration {self.family!r}", "None")
            )
        super().__init__(
            **arguments_of_tokenizer(
                tokenizer,
                settings,
                processor=processor,
                media_policy=media_policy,
                media_store=media_store,
                now=now,
            )
        )


class DefaultRenderer(FamilyRenderer, family=DEFAULT_FAMILY, module="default"):
    """A model that is not listed: its own template decides, and probing finds its format."""


class DeepSeekV3Renderer(FamilyRenderer, family="deepseek-v3", module="deepseek_v3"): ...


class DeepSeekR1Renderer(DeepSeekV3Renderer, family="deepseek-r1", module="deepseek_r1"): ...


class DeepSeekV4Renderer(FamilyRenderer, family="deepseek-v4", module="deepseek_v4"): ...


class Gemma4Renderer(FamilyRenderer, family="gemma4", module="gemma4"): ...


class GLM45Renderer(FamilyRenderer, family="glm-4.5", module="glm45"): ...


class GLM5Renderer(FamilyRenderer, family="glm-5", module="glm5"): ...


class GLM51Renderer(GLM5Renderer, family="glm-5.1"): ...


class GLM53Renderer(GLM5Renderer, family="glm-5.3"): ...


class GptOssRenderer(FamilyRenderer, family="gpt-oss", module="gpt_oss"): ...


class Hy3Renderer(FamilyRenderer, family="hy3", module="hy3"): ...


class InklingRenderer(FamilyRenderer, family="inkling", module="inkling"): ...


class KimiK2Renderer(FamilyRenderer, family="kimi-k2", module="kimi_k2"): ...


class KimiK25Renderer(FamilyRenderer, family="kimi-k2.5", module="kimi_k25"): ...


class LagunaXS2Renderer(FamilyRenderer, family="laguna-xs.2", module="laguna_xs2"): ...


class LagunaM1Renderer(LagunaXS2Renderer, family="laguna-m.1"): ...


class LagunaXS21Renderer(LagunaXS2Renderer, family="laguna-xs-2.1"): ...


class LagunaS21Renderer(LagunaXS21Renderer, family="laguna-s-2.1", module="laguna_s21"): ...


class Llama3Renderer(FamilyRenderer, family="llama-3", module="llama_3"): ...


class MiniMaxM2Renderer(FamilyRenderer, family="minimax-m2", module="minimax_m2"): ...


class Nemotron3Renderer(FamilyRenderer, family="nemotron-3", module="nemotron3"): ...


class Nemotron3UltraRenderer(Nemotron3Renderer, family="nemotron-3-ultra"): ...


class Nemotron35Renderer(Nemotron3Renderer, family="nemotron-3.5"): ...


class PrimeQwen3Renderer(FamilyRenderer, family="prime-qwen3", module="prime_qwen3"): ...


class Qwen3Renderer(FamilyRenderer, family="qwen3", module="qwen3"): ...


class Qwen3VLRenderer(FamilyRenderer, family="qwen3-vl", module="qwen3_vl"): ...


class Qwen35Renderer(FamilyRenderer, family="qwen3.5", module="qwen35"): ...


class Qwen36Renderer(Qwen35Renderer, family="qwen3.6", module="qwen36"): ...


class Qwen38Renderer(Qwen36Renderer, family="qwen3.8", module="qwen38"): ...


def add_family_modules(package: ModuleType) -> None:
    """Make `renderers.qwen3_vl` and the other modules of families importable, each with its classes."""
    for renderer in _CLASSES.values():
        name = f"{package.__name__}.{renderer.module}"
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
            setattr(package, renderer.module, sys.modules[name])
        names = vars(sys.modules[name])
        names[renderer.__name__] = renderer
        names.setdefault("__all__", []).append(renderer.__name__)
