"""Typed configurations of renderers, one pydantic model per model family, and their union `RendererConfig`.

The names, the fields and their defaults are those of the distribution `renderers` 0.1.12 on PyPI, whose users
write them into configuration files and command lines. `renderers.family_options` turns them into
`RendererOptions`.

A field is either a variable of the family's chat template or internal. Internal fields that configured that
package's own caches and parsers are accepted, because configurations contain them, and are described where
they do nothing here.
"""

import importlib
import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


def load_target(import_path: str) -> Any:
    """The object that `module.Name` or `path/to/file.py:Name` names; the module is imported.

    Raises `ValueError` for a path of another form and for a name that the module does not have,
    `FileNotFoundError` for a missing file.
    """
    separator = ":" if ":" in import_path else "."
    module_name, _, name = import_path.rpartition(separator)
    if not module_name or not name or (separator == "." and ("/" in import_path or name == "py")):
        raise ValueError(f"import_path {import_path!r} must look like module.Name or path/to/file.py:Name")
    module = _file_module(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    if not hasattr(module, name):
        raise ValueError(f"import_path {import_path!r}: {module_name} has no attribute {name!r}")
    return getattr(module, name)


def _file_module(path: Path) -> ModuleType:
    """The module of a file, imported once; two files of one name are two modules."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"import_path: there is no file {path}")
    name = f"custom_renderer_{path.stem}_{blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs, as `import` does: its dataclasses look themselves up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


if TYPE_CHECKING:
    _ConfigBase = BaseModel
else:
    try:  # the base class of the configurations of verifiers and prime-rl, which reads command lines
        from pydantic_config import BaseConfig as _ConfigBase
    except ImportError:
        _ConfigBase = BaseModel

ThinkingRetention = Literal["tool_cycle", "all"]
ResolvedThinkingRetention = Literal["template", "tool_cycle", "all"]

INKLING_EFFORT_MAP: Final = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "max": 0.99}


class BaseRendererConfig(_ConfigBase):
    """The base of all configurations: immutable, and without fields that the family does not have.

    thinking_retention: how long a bridge keeps reasoning that a full render would drop: `tool_cycle` (until
        the next user or developer message) or `all`. None follows the template variables of the
        configuration. An explicit value that contradicts an explicit template variable is a `ValueError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    thinking_retention: ThinkingRetention | None = None

    #: The fields that are no variables of the chat template; all others are.
    _internal_fields: ClassVar[frozenset[str]] = frozenset()
    _allow_opaque_template_kwargs: ClassVar[bool] = False
    #: A template variable that decides about earlier reasoning, and what True and False of it mean.
    _retention_variable: ClassVar[tuple[str, ThinkingRetention, ThinkingRetention] | None] = None
    #: What a bridge does where neither `thinking_retention` nor a variable says it.
    _default_retention: ClassVar[ResolvedThinkingRetention] = "tool_cycle"

    @classmethod
    def template_field_names(cls) -> frozenset[str]:
        """The fields that are variables of the chat template."""
        return frozenset(cls.model_fields) - frozenset(BaseRendererConfig.model_fields) - cls.internal_field_names()

    @classmethod
    def internal_field_names(cls) -> frozenset[str]:
        """The other fields: the `_internal_fields` of the class and of those that it extends."""
        return frozenset().union(*(vars(base).get("_internal_fields", ()) for base in cls.__mro__))

    @model_validator(mode="after")
    def _check_retention(self) -> Self:
        implied = self._implied_retention()
        if self.thinking_retention is None or implied is None or self.thinking_retention == implied:
            return self
        assert self._retention_variable is not None
        variable = self._retention_variable[0]
        if variable not in self.model_fields_set:
            return self
        raise ValueError(
            f"{variable}={getattr(self, variable)!r} implies thinking_retention={implied!r}, which "
            f"contradicts thinking_retention={self.thinking_retention!r}; set one of them"
        )

    def _implied_retention(self) -> ThinkingRetention | None:
        """What the template variable for it, set or by default, says about earlier reasoning."""
        if self._retention_variable is None:
            return None
        variable, if_true, if_false = self._retention_variable
        value = getattr(self, variable)
        return None if value is None else if_true if value else if_false

    def resolved_retention(self) -> ResolvedThinkingRetention:
        """The explicit value, else what the template variables imply, else the family's default."""
        return self.thinking_retention or self._implied_retention() or self._default_retention


class AutoRendererConfig(BaseRendererConfig):
    """The family that `MODEL_RENDERER_MAP` has for the model, else `DefaultRendererConfig`."""

    name: Literal["auto"] = "auto"


class DefaultRendererConfig(BaseRendererConfig):
    """Any model: its own template decides, and probing finds its format. Further fields are template variables.

    `tool_parser` and `reasoning_parser` name a parser of the package that this one replaces. Probing finds
    the syntax of tool calls and reasoning in the template itself, so both names are accepted and not used.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Literal["default"] = "default"
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    _internal_fields = frozenset({"tool_parser", "reasoning_parser"})
    _allow_opaque_template_kwargs = True
    _default_retention = "template"

    @model_validator(mode="after")
    def _refuse_former_fields(self) -> Self:
        former = {"preserve_all_thinking", "preserve_thinking_between_tool_calls"}.intersection(self.model_extra or ())
        if former:
            raise ValueError(f"{sorted(former)} are no fields any more; set thinking_retention")
        return self


class _ImageConfig(BaseRendererConfig):
    """`image_cache_max` is not used: caches are bounded in bytes (`RendererOptions`, `MediaStore`)."""

    image_cache_max: int = 256

    _internal_fields = frozenset({"image_cache_max"})


class _QwenVisionConfig(_ImageConfig):
    add_vision_id: bool = False


class _QwenThinkingVisionConfig(_QwenVisionConfig):
    """`enable_thinking` None leaves the choice to the template: small models do not think by default."""

    enable_thinking: bool | None = None


class Qwen3RendererConfig(BaseRendererConfig):
    name: Literal["qwen3"] = "qwen3"
    enable_thinking: bool = True


class PrimeQwen3RendererConfig(BaseRendererConfig):
    name: Literal["prime-qwen3"] = "prime-qwen3"


class Qwen35RendererConfig(_QwenThinkingVisionConfig):
    name: Literal["qwen3.5"] = "qwen3.5"


class Qwen36RendererConfig(_QwenThinkingVisionConfig):
    name: Literal["qwen3.6"] = "qwen3.6"
    preserve_thinking: bool = False

    _retention_variable = ("preserve_thinking", "all", "tool_cycle")


class Qwen38RendererConfig(_QwenThinkingVisionConfig):
    name: Literal["qwen3.8"] = "qwen3.8"
    preserve_thinking: bool = True
    reasoning_effort: Literal["xhigh", "medium", "low"] = "xhigh"

    _retention_variable = ("preserve_thinking", "all", "tool_cycle")


class Qwen3VLRendererConfig(_QwenVisionConfig):
    name: Literal["qwen3-vl"] = "qwen3-vl"


class Gemma4RendererConfig(_ImageConfig):
    name: Literal["gemma4"] = "gemma4"
    enable_thinking: bool = False
    preserve_thinking: bool = False

    _retention_variable = ("preserve_thinking", "all", "tool_cycle")


class _GLM5Config(BaseRendererConfig):
    enable_thinking: bool = True
    clear_thinking: bool = True

    _retention_variable = ("clear_thinking", "tool_cycle", "all")


class GLM5RendererConfig(_GLM5Config):
    name: Literal["glm-5"] = "glm-5"


class GLM51RendererConfig(_GLM5Config):
    name: Literal["glm-5.1"] = "glm-5.1"


class GLM53RendererConfig(BaseRendererConfig):
    name: Literal["glm-5.3"] = "glm-5.3"
    clear_thinking: bool = False
    reasoning_effort: Literal["low", "high", "max"] = "max"

    _retention_variable = ("clear_thinking", "tool_cycle", "all")


class GLM45RendererConfig(BaseRendererConfig):
    name: Literal["glm-4.5"] = "glm-4.5"
    enable_thinking: bool = True


class Hy3RendererConfig(BaseRendererConfig):
    """`preserved_thinking` None leaves the choice to the template: True with tools."""

    name: Literal["hy3"] = "hy3"
    reasoning_effort: Literal["no_think", "low", "high"] = "no_think"
    preserved_thinking: bool | None = None
    is_training: bool = False
    raw_last_assistant: bool = False
    fallback_strategy: Literal["reasoning_toolcall_retry"] | None = None

    _retention_variable = ("preserved_thinking", "all", "tool_cycle")


class InklingRendererConfig(_ImageConfig):
    """`reasoning_effort` is a name of `INKLING_EFFORT_MAP` or a number in [0, 0.99]."""

    name: Literal["inkling"] = "inkling"
    reasoning_effort: str | float = 0.9
    audio_cache_max: int = 256

    _internal_fields = frozenset({"image_cache_max", "audio_cache_max"})
    _default_retention = "all"

    @model_validator(mode="after")
    def _check_effort(self) -> Self:
        effort = self.reasoning_effort
        valid = effort.strip() in INKLING_EFFORT_MAP if isinstance(effort, str) else 0.0 <= effort <= 0.99
        if not valid:
            raise ValueError(f"reasoning_effort={effort!r} is not one of {list(INKLING_EFFORT_MAP)}, nor in [0, 0.99]")
        return self


class GptOssRendererConfig(BaseRendererConfig):
    """`use_system_prompt=False` and `knowledge_cutoff` are refused: the template prints that message."""

    name: Literal["gpt-oss"] = "gpt-oss"
    reasoning_effort: Literal["low", "medium", "high"] = "medium"
    conversation_start_date: str | None = None
    use_system_prompt: bool = True
    knowledge_cutoff: str | None = None
    model_identity: str | None = None
    auto_drop_analysis: bool = True

    _internal_fields = frozenset({"use_system_prompt", "knowledge_cutoff", "model_identity", "auto_drop_analysis"})
    _retention_variable = ("auto_drop_analysis", "tool_cycle", "all")


class KimiK2RendererConfig(BaseRendererConfig):
    """`enable_thinking` is accepted and not used: the template has no such variable."""

    name: Literal["kimi-k2"] = "kimi-k2"
    enable_thinking: bool = True

    _internal_fields = frozenset({"enable_thinking"})


class KimiK25RendererConfig(_ImageConfig):
    name: Literal["kimi-k2.5"] = "kimi-k2.5"
    thinking: bool = True


class _LagunaRawConfig(BaseRendererConfig):
    enable_thinking: bool = False
    render_assistant_messages_raw: bool = False


class LagunaXS2RendererConfig(_LagunaRawConfig):
    name: Literal["laguna-xs.2"] = "laguna-xs.2"


class LagunaM1RendererConfig(_LagunaRawConfig):
    name: Literal["laguna-m.1"] = "laguna-m.1"


class LagunaXS21RendererConfig(BaseRendererConfig):
    name: Literal["laguna-xs-2.1"] = "laguna-xs-2.1"
    enable_thinking: bool = False


class LagunaS21RendererConfig(BaseRendererConfig):
    name: Literal["laguna-s-2.1"] = "laguna-s-2.1"
    enable_thinking: bool = True
    preserve_thinking: bool = False


class Llama3RendererConfig(BaseRendererConfig):
    """`date_string` has a fixed default, so that the same conversation has the same tokens every day."""

    name: Literal["llama-3"] = "llama-3"
    date_string: str = "26 Jul 2024"
    tools_in_user_message: bool = True


class MiniMaxM2RendererConfig(BaseRendererConfig):
    name: Literal["minimax-m2"] = "minimax-m2"
    model_identity: str = "You are a helpful assistant. Your name is MiniMax-M2.5 and is built by MiniMax."


class _NemotronConfig(BaseRendererConfig):
    enable_thinking: bool = True
    truncate_history_thinking: bool = True

    _retention_variable = ("truncate_history_thinking", "tool_cycle", "all")


class Nemotron3RendererConfig(_NemotronConfig):
    name: Literal["nemotron-3"] = "nemotron-3"
    low_effort: bool = False


class Nemotron3UltraRendererConfig(_NemotronConfig):
    name: Literal["nemotron-3-ultra"] = "nemotron-3-ultra"
    medium_effort: bool = False


class Nemotron35RendererConfig(_NemotronConfig):
    name: Literal["nemotron-3.5"] = "nemotron-3.5"


class DeepSeekV3RendererConfig(BaseRendererConfig):
    name: Literal["deepseek-v3"] = "deepseek-v3"


class DeepSeekR1RendererConfig(BaseRendererConfig):
    name: Literal["deepseek-r1"] = "deepseek-r1"

    _default_retention = "template"


class DeepSeekV4RendererConfig(BaseRendererConfig):
    """`reasoning_effort` names texts of the checkpoints of 31 July; earlier ones have others."""

    name: Literal["deepseek-v4"] = "deepseek-v4"
    enable_thinking: bool = False
    drop_thinking: bool = True
    reasoning_effort: Literal["low", "high", "max"] = "low"

    _retention_variable = ("drop_thinking", "tool_cycle", "all")


class CustomRendererConfig(BaseRendererConfig):
    """A renderer of another package: `import_path` is `module.Class`; further fields belong to its own configuration.

    The class has an attribute `config_class`, a subclass of `BaseRendererConfig`, and takes a tokenizer and
    such a configuration.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Literal["custom"] = "custom"
    import_path: str

    _internal_fields = frozenset({"import_path"})

    @model_validator(mode="after")
    def _check_renderer(self) -> Self:
        custom_renderer_config(self)
        return self


def custom_renderer_config(config: CustomRendererConfig) -> BaseRendererConfig:
    """The configuration of the renderer's own class, made of the fields beside `name` and `import_path`."""
    fields = config.model_dump(exclude_unset=True, exclude={"name", "import_path"})
    validated: BaseRendererConfig = load_custom_renderer(config.import_path).config_class.model_validate(fields)
    return validated


def load_custom_renderer(import_path: str) -> Any:
    """The renderer class of an import path. Raises `TypeError` if it has no `config_class`."""
    renderer_class = load_target(import_path)
    config_class = getattr(renderer_class, "config_class", None)
    if not (isinstance(config_class, type) and issubclass(config_class, BaseRendererConfig)):
        raise TypeError(f"{import_path}: config_class must be a subclass of BaseRendererConfig, not {config_class!r}")
    return renderer_class


RendererConfig = Annotated[
    AutoRendererConfig
    | DefaultRendererConfig
    | Qwen3RendererConfig
    | PrimeQwen3RendererConfig
    | Qwen35RendererConfig
    | Qwen36RendererConfig
    | Qwen38RendererConfig
    | Qwen3VLRendererConfig
    | Gemma4RendererConfig
    | GLM5RendererConfig
    | GLM51RendererConfig
    | GLM53RendererConfig
    | GLM45RendererConfig
    | GptOssRendererConfig
    | Hy3RendererConfig
    | InklingRendererConfig
    | KimiK2RendererConfig
    | KimiK25RendererConfig
    | LagunaXS2RendererConfig
    | LagunaM1RendererConfig
    | LagunaXS21RendererConfig
    | LagunaS21RendererConfig
    | Llama3RendererConfig
    | MiniMaxM2RendererConfig
    | Nemotron3RendererConfig
    | Nemotron3UltraRendererConfig
    | Nemotron35RendererConfig
    | DeepSeekV3RendererConfig
    | DeepSeekR1RendererConfig
    | DeepSeekV4RendererConfig
    | CustomRendererConfig,
    Field(discriminator="name"),
]
"""The union of all configurations, told apart by `name`; the type of a field of a pydantic model."""

_CONFIG_CLASSES: Final[dict[str, type[BaseRendererConfig]]] = {
    config.model_fields["name"].default: config
    for config in RendererConfig.__origin__.__args__  # type: ignore[attr-defined]
    if config is not CustomRendererConfig
}


def config_class(name: str) -> type[BaseRendererConfig]:
    """The configuration of a family. Raises a `ValueError` that lists the names for an unknown one."""
    if name not in _CONFIG_CLASSES:
        raise ValueError(f"there is no renderer configuration {name!r}; the names are {', '.join(_CONFIG_CLASSES)}")
    return _CONFIG_CLASSES[name]


def config_from_name(name: str) -> BaseRendererConfig | None:
    """The configuration of a family with its defaults; None for `auto`, as `create_renderer` takes it."""
    return None if name == "auto" else config_class(name)()
