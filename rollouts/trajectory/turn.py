"""A turn of an episode: what is known of one call of the model beside its tokens."""

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

    `seconds` is how long the engine took. `agent` names which agent of the episode took the turn: "" is the
    one that plays the episode's environment. Raises `TrajectoryError` for values of another type, also when
    decoded.
    """

    node: int
    finish_reason: FinishReason
    message: Message
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    agent: str = ""

    def __post_init__(self) -> None:
        error: str | None = None
        if type(self.node) is not int or self.node < 0:
            error = "the node is not the index of its completion's node"
        elif not isinstance(self.finish_reason, FinishReason):
            error = f"it has no FinishReason, but {quoted(self.finish_reason)}"
        elif not isinstance(self.message, dict) or not isinstance(self.info, dict):
            error = "its message or its info is not a dict"
        elif not is_plain_number(self.reward) or not is_plain_number(self.seconds):
            error = f"its reward {quoted(self.reward)} and seconds {quoted(self.seconds)} are not both finite numbers"
        elif type(self.agent) is not str:
            error = f"its agent {quoted(self.agent)} is no text"
        if error is not None:
            raise TrajectoryError(f"the turn of node {quoted(self.node)}: {error}")


_LARGEST: Final = sys.float_info.max


def is_plain_number(value: object) -> bool:
    """Whether the value is a finite float, or an int that a float can hold. Called for every decoded turn."""
    return (type(value) is float or type(value) is int) and -_LARGEST <= value <= _LARGEST
