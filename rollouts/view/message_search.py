"""Finds texts in the messages of an episode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rollouts.trajectory.tree import Trajectory
from rollouts.view.display_json import display_json

# Names and digests that a reader does not see as text; the page leaves out the same (frontend/src/message_texts.ts).
_NO_TEXT: Final = frozenset({"role", "type", "$source"})


def has_texts(trajectory: Trajectory, wanted: Sequence[str]) -> bool:
    """Whether each of `wanted` is a part of a text of the messages. Upper and lower case are equal."""
    messages = [message for node in trajectory.nodes for message in node.messages]
    text = "\n".join(_texts(display_json([*messages, *(turn.message for turn in trajectory.turns)]))).lower()
    return all(each.lower() in text for each in wanted)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for member in value:
            yield from _texts(member)
    elif isinstance(value, dict):
        for name, member in value.items():
            if name not in _NO_TEXT:
                yield from _texts(member)
