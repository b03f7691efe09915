"""Where the tokens of a branch differ from a full render of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Final, NamedTuple

import numpy as np

from renderers import RenderedTokens, Renderer
from renderers.errors import RendererError
from rollouts.errors import RolloutsError
from rollouts.trajectory.tree import Trajectory

# The time of the comparison grows with the product of the lengths; a longer part is shown as one difference.
_MAX_COMPARED: Final = 4096


class Difference(NamedTuple):
    """Tokens `start:end` of the branch stand where the render has `rendered_ids`, at its token `rendered_start`."""

    start: int
    end: int
    rendered_start: int
    rendered_ids: list[int]


@dataclass(frozen=True, slots=True)
class BranchDrift:
    """The comparison of the branch of `leaf` with a render of its messages. `error` says why there is none.

    `rendered` is the number of tokens of the render, `extra_end` how many tokens it has after the branch's last one:
    scaffold that the template prints after the last turn, which is no difference.
    """

    leaf: int
    error: str = ""
    rendered: int = 0
    extra_end: int = 0
    differences: list[Difference] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "leaf": self.leaf,
            "error": self.error,
            "rendered": self.rendered,
            "extraEnd": self.extra_end,
            "differences": [
                {"start": each.start, "end": each.end, "renderedStart": each.rendered_start, "ids": each.rendered_ids}
                for each in self.differences
            ],
        }


def branch_drift(
    trajectory: Trajectory, leaf: int, renderer: Renderer, tools: Sequence[Any] | None
) -> tuple[BranchDrift, RenderedTokens | None]:
    """Compare one branch, and return the render with the comparison; None if the messages cannot be rendered."""
    is_completion = any(turn.node == leaf for turn in trajectory.turns)
    try:
        messages = trajectory.to_messages(leaf)
        rendered = renderer.render(messages, tools=tools, add_generation_prompt=not is_completion)
    except (RolloutsError, RendererError) as error:
        return BranchDrift(leaf, error=str(error)), None
    ids = trajectory.token_ids(leaf).tolist()
    differences = token_differences(ids, rendered.token_ids)
    extra = 0
    if differences and differences[-1].start == differences[-1].end == len(ids):
        extra = len(differences.pop().rendered_ids)
    return BranchDrift(leaf, "", len(rendered.token_ids), extra, differences), rendered


def token_differences(ids: Sequence[int], rendered: Sequence[int]) -> list[Difference]:
    """The differences in order, none if both are equal. Replacing each range by its `rendered_ids` gives `rendered`."""
    start = _common_prefix(ids, rendered)
    end = _common_prefix(ids[start:][::-1], rendered[start:][::-1])
    middle, other = ids[start : len(ids) - end], rendered[start : len(rendered) - end]
    if not middle and not other:
        return []
    if max(len(middle), len(other)) > _MAX_COMPARED:
        return [Difference(start, start + len(middle), start, list(other))]
    matcher = SequenceMatcher(None, middle, other, autojunk=False)
    return [
        Difference(start + a, start + b, start + c, list(other[c:d]))
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal"
    ]


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    unequal = np.flatnonzero(np.asarray(one[:length], np.int64) != np.asarray(other[:length], np.int64))
    return int(unequal[0]) if len(unequal) else length
