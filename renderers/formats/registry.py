"""All families: in the order of detection, and by name."""

from __future__ import annotations

from renderers.errors import UnknownFormatError
from renderers.formats.chatml import CHATML, HERMES
from renderers.formats.deepseek import DEEPSEEK, DEEPSEEK_V3, DEEPSEEK_V4, DEEPSEEK_V31, DEEPSEEK_V32
from renderers.formats.family import Family
from renderers.formats.gemma import GEMMA3, GEMMA4
from renderers.formats.glm import GLM4, GLM5, GLM45
from renderers.formats.gpt_oss import GPT_OSS
from renderers.formats.kimi import KIMI_K2
from renderers.formats.lfm2 import LFM2
from renderers.formats.llama import LLAMA3, LLAMA4, LLAMA4_PYTHONIC, LLAMA31
from renderers.formats.minimax import MINIMAX_M2, MINIMAX_M3
from renderers.formats.mistral import MISTRAL
from renderers.formats.phi import PHI4_MINI
from renderers.formats.qwen import NEMOTRON3, QWEN3, QWEN3_CODER, QWEN35, QWEN_VL
from renderers.parsing.format import Format

#: Families with tool calls come first, because the template must print a call that they parse; of those that parse the
#: same calls, the one with more conditions comes first.
FAMILIES: tuple[Family, ...] = (
    GPT_OSS,
    GEMMA4,
    KIMI_K2,
    MINIMAX_M3,
    MINIMAX_M2,
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V31,
    DEEPSEEK_V3,
    GLM45,
    GLM5,
    NEMOTRON3,
    QWEN35,
    QWEN3_CODER,
    LFM2,
    MISTRAL,
    PHI4_MINI,
    LLAMA31,
    LLAMA4,
    LLAMA4_PYTHONIC,
    QWEN3,
    HERMES,
    GEMMA3,
    GLM4,
    DEEPSEEK,
    LLAMA3,
    QWEN_VL,
    CHATML,
)


def names() -> tuple[str, ...]:
    """The names that `by_name` accepts."""
    return tuple(family.format.name for family in FAMILIES)


def by_name(name: str) -> Format:
    """The format of a family. Raises `UnknownFormatError`, which lists the names.

    Where the templates of a family differ (whether the prompt opens reasoning, the form of arguments), the format has
    the most frequent variant; `detect_format` reads it from the template.
    """
    for family in FAMILIES:
        if family.format.name == name:
            return family.format
    raise UnknownFormatError(name, names())
