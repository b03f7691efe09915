"""What a family's name stands for where no configuration changes it: formats, rules of parsing, default options.

`renderers.family_options` adds what the fields of a typed configuration change. This module does not need pydantic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from renderers.bridging.refusals import ThinkingRetention
from renderers.errors import ConfigError
from renderers.options import RendererOptions
from renderers.parsing.format import Format

#: The family of a model that `MODEL_RENDERER_MAP` does not have.
DEFAULT_FAMILY: Final = "default"

#: Llama's template prints a date. A fixed one gives the same conversation the same tokens every day.
LLAMA_3_DATE: Final = "26 Jul 2024"

#: Family -> the formats that its models' templates may have.
_FORMATS_OF_FAMILY: Final[dict[str, tuple[str, ...]]] = {
    "qwen3": ("qwen3", "hermes"),
    "prime-qwen3": ("qwen3.5", "qwen3-coder"),
    "qwen3.5": ("qwen3.5",),
    "qwen3.6": ("qwen3.5",),
    "qwen3.8": ("qwen3.5",),
    "qwen3-vl": ("qwen3", "hermes", "qwen-vl"),
    "gemma4": ("gemma-4",),
    "glm-5": ("glm-5",),
    "glm-5.1": ("glm-5",),
    "glm-5.3": ("glm-5",),
    "glm-4.5": ("glm-4.5",),
    "gpt-oss": ("gpt-oss",),
    "kimi-k2": ("kimi-k2",),
    "kimi-k2.5": ("kimi-k2",),
    "minimax-m2": ("minimax-m2",),
    "nemotron-3": ("nemotron-3",),
    "nemotron-3-ultra": ("nemotron-3",),
    "nemotron-3.5": ("nemotron-3",),
    "deepseek-v3": ("deepseek-v3", "deepseek"),
    "deepseek-r1": ("deepseek-v3", "deepseek"),
    "deepseek-v4": ("deepseek-v4",),
    "llama-3": ("llama-3.1", "llama-3"),
    "hy3": ("hy3",),
    "laguna-m.1": ("laguna",),
    "laguna-s-2.1": ("laguna",),
    "laguna-xs-2.1": ("laguna",),
    "laguna-xs.2": ("laguna",),
}
_FORMATS_OF_NO_FAMILY: Final = ("generic", "chatml")

#: Family -> how long a bridge keeps reasoning by default, where that is not `tool_cycle`.
_DEFAULT_RETENTION: Final[dict[str, ThinkingRetention]] = {
    DEFAULT_FAMILY: "template",
    "deepseek-r1": "template",
    "glm-5.3": "all",
    "inkling": "all",
    "qwen3.8": "all",
}

#: With the configuration of these, a call inside open reasoning stays reasoning unless it ends the turn.
_CALLS_STAY_IN_REASONING: Final = (
    "deepseek-r1",
    "deepseek-v3",
    "gpt-oss",
    "hy3",
    "laguna-m.1",
    "laguna-s-2.1",
    "laguna-xs-2.1",
    "laguna-xs.2",
    DEFAULT_FAMILY,
)


def default_options(family: str) -> RendererOptions:
    """The options that the configuration of a family stands for when none of its fields is set."""
    return RendererOptions(
        chat_template_kwargs={"date_string": LLAMA_3_DATE} if family == "llama-3" else {},
        thinking_retention=_DEFAULT_RETENTION.get(family, "tool_cycle"),
        tool_arguments="auto",
    )


def with_parsing_rules(format: Format, family: str) -> Format:
    """The format with the rules by which the parser of this family decides, as inference servers do."""
    return replace(
        format,
        calls_end_reasoning=family not in _CALLS_STAY_IN_REASONING,
        drops_repeated_start=True,
        assumes_open_reasoning=False,
        reports_unknown_tools=family.startswith(("glm-", "gemma")),
        reports_noncanonical=False,  # PyPI's `renderers` has no such status: its users would not make the call
    )


def check_family(family: str, format_name: str, model: str) -> None:
    """Raise a `ConfigError` if the model's template has the format of another family."""
    formats = _FORMATS_OF_FAMILY.get(family)
    if formats is None or format_name in (*formats, *_FORMATS_OF_NO_FAMILY):
        return
    fitting = [name for name, formats in _FORMATS_OF_FAMILY.items() if format_name in formats]
    raise ConfigError(
        f"the configuration for {model}, whose template has the format {format_name!r},",
        family,
        (*fitting, DEFAULT_FAMILY, "auto"),
    )
