"""Why a value cannot be sent, before it is known where it sits."""

from __future__ import annotations


class NotSendableError(ValueError):
    """A value that has no form on the wire, and the cure; the codec raises `EncodeError` from it and adds the place."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason, cure)
        self.reason = reason
        self.cure = cure
