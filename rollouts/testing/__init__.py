"""Small real things to test against: complete checkpoint directories that fit in a test, and a scripted engine."""

from rollouts.testing.errors import ScriptError
from rollouts.testing.scripted_engine import ScriptedAnswer, ScriptedEngine
from rollouts.testing.tiny_model import CHAT_TEMPLATE, tiny_qwen3_vl

__all__ = ["CHAT_TEMPLATE", "ScriptError", "ScriptedAnswer", "ScriptedEngine", "tiny_qwen3_vl"]
