"""Rewards by a language model that reads a conversation."""

from rollouts.judge.judge import Judge, JudgeUsage, Verdict

__all__ = ["Judge", "JudgeUsage", "Verdict"]
