"""For tests of environments and trainers: small complete checkpoint directories, and an engine that runs a script."""

from rollouts.testing.scripted_engine import ScriptedCompletion, ScriptedEngine, ScriptError
from rollouts.testing.tiny_model import CHAT_TEMPLATE, tiny_qwen3_vl

__all__ = ["CHAT_TEMPLATE", "ScriptError", "ScriptedCompletion", "ScriptedEngine", "tiny_qwen3_vl"]
