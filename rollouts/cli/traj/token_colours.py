"""The colours of tokens on a terminal, which are those of the viewer on a light page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from rollouts.trajectory.token_node import TokenNode
from rollouts.view.token_columns import TRAINER_LOGPROBS

_ROLES: Final = {
    "system": "#fbecb8",
    "developer": "#fbdcd6",
    "user": "#d3e6fb",
    "tool": "#e2dcf8",
    "assistant": "#d2f0d8",
}
_OTHER: Final = "#e7e7e3"
_COLD, _HOT = (0xFF, 0xFF, 0xFF), (0xF0, 0x70, 0x5C)
_STEPS: Final = 10
_UNMARKED: Final = "color(245)"


class By(StrEnum):
    """The meaning of the colours."""

    OWNER = "owner"
    SAMPLED = "sampled"
    LOGPROB = "logprob"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class NodeColumns:
    """What is known of each token of a node: `sampled` bool (n,), `scaffold` bool (n,); `logprobs` and `mismatch`
    float64 (n,), NaN where they are not known; the `roles` of the messages that own the tokens, "" for none.
    """

    sampled: np.ndarray
    scaffold: np.ndarray
    logprobs: np.ndarray
    mismatch: np.ndarray
    roles: tuple[str, ...]

    def number(self, by: By, token: int) -> float:
        """The number of a token that `by` shows; NaN where there is none."""
        column = {By.LOGPROB: self.logprobs, By.MISMATCH: self.mismatch}.get(by)
        return math.nan if column is None else float(column[token])

    def style(self, by: By, token: int) -> str:
        """The style of a token for rich."""
        if by is By.SAMPLED:
            return f"black on {_ROLES['assistant']}" if self.sampled[token] else _UNMARKED
        if by is By.OWNER:
            if self.scaffold[token] and not self.sampled[token]:
                return _UNMARKED
            return f"black on {_ROLES.get(self.roles[token], _OTHER)}"
        share = _share(by, self.number(by, token))
        return _UNMARKED if math.isnan(share) else f"black on {_mixed(share)}"


def node_columns(node: TokenNode, roles: tuple[str, ...], trainer_logprobs: np.ndarray | None = None) -> NodeColumns:
    """The columns of a node whose tokens are owned by messages of these roles.

    Without `trainer_logprobs`, float32 (n,), those of the trainer are read from the extra of that name.
    """
    logprobs = np.full(len(node), np.nan)
    logprobs[node.sampled] = node.logprobs
    trainer = node.extras.get(TRAINER_LOGPROBS) if trainer_logprobs is None else trainer_logprobs
    mismatch = np.full(len(node), np.nan)
    if trainer is not None and trainer.ndim == 1 and trainer.dtype.kind in "biuf":
        mismatch = np.abs(trainer.astype(np.float64) - logprobs)
    scaffold = np.zeros(len(node), bool) if node.content is None else ~node.content
    return NodeColumns(node.sampled, scaffold, logprobs, mismatch, roles)


def legend(by: By) -> list[tuple[str, str]]:
    """Texts with their styles."""
    if by is By.OWNER:
        return [*((role, f"black on {colour}") for role, colour in _ROLES.items()), ("scaffold", _UNMARKED)]
    if by is By.SAMPLED:
        return [("sampled: trained", f"black on {_ROLES['assistant']}"), ("not sampled", _UNMARKED)]
    marks: Mapping[By, tuple[str, str, str]] = {
        By.LOGPROB: ("0 (p = 1)", "-3 (p = 0.05)", "-6 (p = 0.0025) or less"),
        By.MISMATCH: ("1e-6 or less", "1e-3", "1 or more"),
    }
    return [(text, f"black on {_mixed(index / 2)}") for index, text in enumerate(marks[by])]


def _share(by: By, number: float) -> float:
    """Where a number is between cold (0) and hot (1), as on the page of the viewer; NaN where it is not known."""
    if math.isnan(number):
        return number
    if by is By.LOGPROB:
        return -number / 6
    return (math.log10(max(number, 1e-6)) + 6) / 6 if math.isfinite(number) else 1.0


def _mixed(share: float) -> str:
    step = max(0, min(_STEPS - 1, math.floor(share * _STEPS))) / (_STEPS - 1)
    return "#" + "".join(f"{round(cold + (hot - cold) * step):02x}" for cold, hot in zip(_COLD, _HOT, strict=True))
