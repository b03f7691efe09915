"""The errors of values without a wire format, before their path in the object is known."""

from __future__ import annotations

from transport.errors import TransportError


class NotEncodableError(TransportError, ValueError):
    """A value has no wire format. The encoder raises an `EncodeError` from it, which has the path of the value."""

    def __init__(self, reason: str, cure: str) -> None:
        self.reason = reason
        self.cure = cure
        super().__init__(reason, cure)
