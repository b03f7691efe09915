"""The errors of values that have no form on the wire, before their place in the object is known."""

from __future__ import annotations

from transport.errors import TransportError


class NotSendableError(TransportError, ValueError):
    """A value has no form on the wire. The codec raises an `EncodeError` from this error and adds the place."""

    def __init__(self, reason: str, cure: str) -> None:
        self.reason = reason
        self.cure = cure
        super().__init__(reason, cure)


class UnsupportedArrayError(NotSendableError):
    """An array or tensor that has no form on the wire."""
