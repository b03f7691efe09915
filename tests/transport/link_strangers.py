"""A peer of the link tests that is no `LinkClient`."""

from __future__ import annotations

import zmq
from link_processes import PATIENCE

from transport.link import LinkLimits
from transport.link.limits import Window
from transport.link.messages import Hello, LinkMessage, Refused, from_frames, to_frames
from transport.wire.wire_format import Buffer


class Stranger:
    """A raw DEALER that says whatever the test wants."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def message(self, message: LinkMessage, *following: Buffer) -> None:
        self._socket.send_multipart(to_frames(message, following))

    def hear(self) -> LinkMessage:
        assert self._socket.poll(1000 * PATIENCE), "the server says nothing"
        return from_frames(self._socket.recv_multipart(), LinkLimits())[0]

    def refusal(self) -> str:
        """The reason that the server gives, after whatever else it says."""
        while not isinstance(heard := self.hear(), Refused):
            pass
        return heard.reason

    def greet(self, name: str = "stranger", window: Window | None = None) -> None:
        self.message(Hello(name, window or LinkLimits().window))

    def close(self) -> None:
        self._context.destroy(0)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
