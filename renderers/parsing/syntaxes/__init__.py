"""The syntaxes of tool calls; a file holds one syntax, or a few similar ones."""

from renderers.parsing.syntaxes.deepseek import DeepSeekCalls
from renderers.parsing.syntaxes.gemma import GemmaCalls
from renderers.parsing.syntaxes.glm import GlmCalls
from renderers.parsing.syntaxes.invoke import InvokeCalls
from renderers.parsing.syntaxes.json_calls import JsonCalls
from renderers.parsing.syntaxes.kimi import KimiCalls
from renderers.parsing.syntaxes.llama import LlamaCalls
from renderers.parsing.syntaxes.minimax_m3 import MiniMaxM3Calls
from renderers.parsing.syntaxes.mistral import MistralCalls
from renderers.parsing.syntaxes.pythonic import PythonicCalls
from renderers.parsing.syntaxes.qwen_xml import QwenXmlCalls
from renderers.parsing.syntaxes.syntax import ToolCallSyntax

__all__ = [
    "DeepSeekCalls",
    "GemmaCalls",
    "GlmCalls",
    "InvokeCalls",
    "JsonCalls",
    "KimiCalls",
    "LlamaCalls",
    "MiniMaxM3Calls",
    "MistralCalls",
    "PythonicCalls",
    "QwenXmlCalls",
    "ToolCallSyntax",
]
