"""Small real things to test against: complete checkpoint directories that fit in a test."""

from rollouts.testing.tiny_model import CHAT_TEMPLATE, tiny_qwen3_vl

__all__ = ["CHAT_TEMPLATE", "tiny_qwen3_vl"]
