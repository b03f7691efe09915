"""A peer of the link tests that is no `LinkClient`."""

from __future__ import annotations

from typing import Any

import zmq
from link_processes import PATIENCE

from transport.link.limits import Credit
from transport.link.messages import NO_SESSION, Greeting, Hello, LinkMessage, to_frames


class Stranger:
    """A raw DEALER that says whatever the test wants."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def message(self, message: LinkMessage) -> None:
        self._socket.send_multipart(to_frames(message))

    def hear(self) -> bytes:
        assert self._socket.poll(1000 * PATIENCE), "the server says nothing"
        frame: bytes = self._socket.recv_multipart()[0]
        return frame

    def refusal(self) -> str:
        """The reason that the server gives, after whatever else it says."""
        while True:
            frame = self.hear()
            if frame[5] == 9:
                return frame[6:].decode()

    def greet(self, name: str = "stranger", **changes: Any) -> None:
        fields = {"session": b"x" * 16, "receiving_session": NO_SESSION, "first_kept": 1}
        fields |= {"received": 0, "acknowledged": 0}
        greeting = Greeting(**{**fields, "credit": Credit(10, 1 << 20), "max_message": 1 << 30, **changes})
        self.message(Hello(greeting, name))

    def close(self) -> None:
        self._context.destroy(0)
