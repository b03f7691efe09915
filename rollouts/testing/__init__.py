"""Tests of environments and trainers use small checkpoint directories and engines without a model."""

from rollouts.testing.scripted_engine import ScriptedCompletion, ScriptedEngine
from rollouts.testing.tiny_model import CHAT_TEMPLATE, tiny_qwen2_audio, tiny_qwen3_vl

__all__ = [
    "CHAT_TEMPLATE",
    "ScriptedCompletion",
    "ScriptedEngine",
    "tiny_qwen2_audio",
    "tiny_qwen3_vl",
]
