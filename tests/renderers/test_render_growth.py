"""The work of a render grows with the length of a conversation, not with its square."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from corpus import user
from loaded import renderer_of

TEMPLATES = [
    "trl/qwen3",
    "trl/llama3_1",
    "trl/gptoss",
    "trl/deepseekv3",
]


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python a call runs; a comparison by lines does not depend on the load of the machine."""
    count = 0

    def count_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return count_line

    earlier = sys.gettrace()
    sys.settrace(count_line)
    try:
        work()
    finally:
        sys.settrace(earlier)
    return count


def growth(work: Callable[[int], object], small: int) -> float:
    """How many times as many lines run for 4 times the length."""
    work(small + 2)  # compiles the template, encodes words for the first time
    return lines_run(lambda: work(4 * small)) / lines_run(lambda: work(small))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_of_four_times_the_messages_takes_at_most_five_times_the_work(template: str) -> None:
    def render(length: int) -> None:
        turns = [user("question"), {"role": "assistant", "content": "answer"}] * (length // 2)
        renderer_of(template).render([*turns, user(f"question {length}")], add_generation_prompt=True)

    assert growth(render, 60) < 5
