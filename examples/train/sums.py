"""Sums of two digits: text alone, one answer, and a function that scores it."""

from rollouts import Task


def tasks():
    return [Task(f"{a}+{b}", [a, b]) for a in range(10) for b in range(10)]


def messages(task):
    return [{"role": "user", "content": "{}+{}=".format(*task.data)}]


def nearness(completion, task):
    """1 for the sum, less the further a number is from it, 0 for any other text."""
    text = completion["content"]
    return 1 / (1 + abs(int(text) - sum(task.data))) if text.isascii() and text.isdigit() and len(text) < 4 else 0.0


def conversations():
    for task in tasks()[::2]:
        yield Task(task.task_id, {"messages": [*messages(task), {"role": "assistant", "content": str(sum(task.data))}]})
