"""A turn of an episode: what is known of one call of the model beside its tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Final

from renderers import Message
from rollouts.engines.protocol import FinishReason
from rollouts.errors import TrajectoryError
from transport import wire_type
from transport.errors import quoted


@wire_type("rollouts.Turn")
@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: the node of its completion, how it ended, and the reward and info from the environment.

    `seconds` is how long the engine took. `agent` names which agent of the episode took the turn: "" is the one that
    plays the episode's environment. Raises `TrajectoryError` for values of another type, also when decoded.
    """

    node: int
    finish_reason: FinishReason
    message: Message
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    agent: str = ""

    def __post_init__(self) -> None:
        if type(self.node) is not int or self.node < 0:
            raise TrajectoryError(f"a turn has the node {quoted(self.node)}; pass the index of its completion's node")
        if not isinstance(self.finish_reason, FinishReason):
            raise TrajectoryError(f"the turn of node {self.node} has no FinishReason, but {quoted(self.finish_reason)}")
        if not isinstance(self.message, dict) or not isinstance(self.info, dict):
            raise TrajectoryError(f"the turn of node {self.node} has a message or an info that is not a dict")
        if not is_plain_number(self.reward) or not is_plain_number(self.seconds):
            raise TrajectoryError(
                f"the turn of node {self.node} has the reward {quoted(self.reward)} and the seconds "
                f"{quoted(self.seconds)}; both are finite numbers"
            )
        if type(self.agent) is not str:
            raise TrajectoryError(f"the turn of node {self.node} has the agent {quoted(self.agent)}, which is no text")


_LARGEST: Final = sys.float_info.max


def is_plain_number(value: object) -> bool:
    """Whether the value is a finite float, or an int that a float can hold. Called for every decoded turn."""
    return (type(value) is float or type(value) is int) and -_LARGEST <= value <= _LARGEST
