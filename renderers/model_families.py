"""Families of models: the repositories of each, the formats of their templates, their rules of parsing."""

from dataclasses import replace
from typing import Final

from renderers.errors import ConfigError
from renderers.parsing.format import Format

_MODELS_OF_FAMILY: Final = {
    "qwen3": (
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-1.7B",
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen3-4B-Thinking-2507",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-14B",
        "Qwen/Qwen3-32B",
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "Qwen/Qwen3-30B-A3B-Thinking-2507",
        "Qwen/Qwen3-235B-A22B",
    ),
    "prime-qwen3": ("PrimeIntellect/Qwen3-0.6B", "PrimeIntellect/Qwen3-1.7B"),
    "qwen3.5": (
        "Qwen/Qwen3.5-0.8B",
        "Qwen/Qwen3.5-2B",
        "Qwen/Qwen3.5-4B",
        "Qwen/Qwen3.5-9B",
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3.5-122B-A10B",
        "Qwen/Qwen3.5-397B-A17B",
    ),
    "qwen3.6": ("Qwen/Qwen3.6-35B-A3B",),
    "qwen3.8": ("Qwen/Qwen3.8-27B", "Qwen/Qwen3.8-Flash-Next"),
    "qwen3-vl": ("Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
    "gemma4": (
        "google/gemma-4-E2B-it",
        "google/gemma-4-E4B-it",
        "google/gemma-4-26B-A4B-it",
        "google/gemma-4-31B-it",
    ),
    "glm-5": ("zai-org/GLM-5", "zai-org/GLM-5-FP8", "zai-org/GLM-4.7-Flash"),
    "glm-5.1": ("zai-org/GLM-5.1",),
    "glm-5.3": ("zai-org/GLM-5.3", "zai-org/GLM-5.3-BF16"),
    "glm-4.5": ("THUDM/GLM-4.5-Air", "zai-org/GLM-4.5-Air"),
    "minimax-m2": ("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.5"),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-Base"),
    "deepseek-r1": ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-0528"),
    "deepseek-v4": ("deepseek-ai/DeepSeek-V4-Flash-0731",),
    "kimi-k2": ("moonshotai/Kimi-K2-Instruct",),
    "kimi-k2.5": ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6"),
    "nemotron-3": (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    ),
    "nemotron-3-ultra": (
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8",
    ),
    "nemotron-3.5": (
        "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
        "nvidia/NVIDIA-Nemotron-3.5-Super-EA-09112026",
    ),
    "llama-3": ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
    "laguna-xs.2": ("poolside/Laguna-XS.2",),
    "laguna-m.1": ("poolside/Laguna-M.1",),
    "laguna-xs-2.1": ("poolside/Laguna-XS-2.1",),
    "laguna-s-2.1": ("poolside/Laguna-S-2.1",),
    "gpt-oss": ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    "inkling": ("thinkingmachines/Inkling", "thinkingmachines/Inkling-Small"),
    "hy3": ("tencent/Hy3", "tencent/Hy3-FP8"),
}

#: Repository name -> the `name` of its configuration. A model that is not listed is no less supported: its
#: own template decides, as with `DefaultRendererConfig`.
MODEL_RENDERER_MAP: Final = {model: family for family, models in _MODELS_OF_FAMILY.items() for model in models}

#: The family of a model that `MODEL_RENDERER_MAP` does not have.
DEFAULT_FAMILY: Final = "default"

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
