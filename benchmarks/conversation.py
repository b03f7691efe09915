"""The task of `benchmarks/runner_and_verifiers.py`: a user who sends a text of 60 words in each turn."""

import random

_WORDS = ["the", "screen", "shows", "a", "list", "of", "files", "opened", "by", "last", "click", "agent"]


def user_text(episode: int, turn: int) -> str:
    """The user's text; the same for both sides."""
    words = random.Random(1000 * episode + turn)
    return f"Turn {turn}: " + " ".join(words.choices(_WORDS, k=60))
