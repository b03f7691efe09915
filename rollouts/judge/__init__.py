"""A judge is a language model that reads a conversation and rewards it."""

from rollouts.judge.judge import Judge, JudgeUsage, Verdict

__all__ = ["Judge", "JudgeUsage", "Verdict"]
