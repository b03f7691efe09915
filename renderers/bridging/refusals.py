"""The reasons why a bridge is refused (an enum), the options that override them, and a count of each.

Which reason holds is decided in `bridging.bridge` and `bridging.continuation`.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from renderers.process.fork_reset import ProcessLock
from renderers.rendered import RenderedTokens

ThinkingRetention = Literal["template", "tool_cycle", "all"]
"""When a bridge may keep reasoning that a full render would drop: never, until the next user or developer message, or
always."""

HistoryPolicy = Literal["template", "as_sampled"]
"""Which history a bridge may extend: only one that a full render would print too, or any that was sampled."""


class BridgeRefusal(StrEnum):
    """Why a bridge could not be proven equal to what the template prints."""

    NO_NEW_MESSAGES = "there are no new messages"
    NO_PROMPT = "the previous prompt is empty"
    ASSISTANT_IN_EXTENSION = "the new messages hold an assistant turn, which was never sampled here"
    OPEN_REASONING = "a stop token was sampled inside open reasoning"
    DROPS_REASONING = "the template drops earlier reasoning here, and thinking_retention does not allow to keep it"
    REWRITES_HISTORY = "the template prints earlier messages differently once these follow"
    NEEDS_HISTORY = "what the template prints depends on earlier messages; pass previous_messages"
    TEMPLATE_REFUSES = "the template refuses to print such a conversation"
    MISSING_MEDIA = "the prompt holds image tokens but no media were passed with it"
    MISPLACED_MEDIA = "a media range does not cover placeholder tokens of the prompt"
    NO_TURN_END = "the template closes this assistant turn with no token at which the model stops"


_noted: ContextVar[list[BridgeRefusal]] = ContextVar("noted_refusals")


@contextmanager
def noting_refusals() -> Iterator[list[BridgeRefusal]]:
    """The reasons of bridges that are refused in the block, also on the threads of a `RendererPool`."""
    reasons: list[BridgeRefusal] = []
    before = _noted.set(reasons)
    try:
        yield reasons
    finally:
        _noted.reset(before)


@dataclass(slots=True)
class BridgeStats:
    """How often bridging succeeded, and how often it was refused for which reason.

    `overridden` counts, among the bridges that succeeded, those that extended a history that a full render
    would have printed differently: `REWRITES_HISTORY` where `history="as_sampled"` allowed it,
    `DROPS_REASONING` where `thinking_retention` did. A bridge may count under both.
    """

    bridged: int = 0
    refused: Counter[BridgeRefusal] = field(default_factory=Counter)
    overridden: Counter[BridgeRefusal] = field(default_factory=Counter)
    _lock: ProcessLock = field(default_factory=ProcessLock, repr=False, compare=False)

    def count(self, outcome: RenderedTokens | BridgeRefusal) -> None:
        if isinstance(outcome, BridgeRefusal):
            _noted.get([]).append(outcome)
        with self._lock:
            if isinstance(outcome, BridgeRefusal):
                self.refused[outcome] += 1
            else:
                self.bridged += 1

    def count_overridden(self, reasons: Collection[BridgeRefusal]) -> None:
        with self._lock:
            self.overridden.update(reasons)
