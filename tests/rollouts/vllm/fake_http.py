"""HTTP for `FakeVLLM`: requests as received, responses, and the sending side of a connection."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Json = Any


@dataclass(eq=False)
class Seen:
    """A request as it came. `connection` numbers the connections; `disconnected` is set when its connection ends."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    connection: int = 0
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    @cached_property
    def json(self) -> Json:
        return json.loads(self.body)

    @property
    def request_id(self) -> str:
        """The id under which vLLM knows the request."""
        return "generate-tokens-" + (self.headers.get("x-request-id") or self.json.get("request_id") or "random")

    @property
    def shipped(self) -> list[str]:
        """The image hashes that came with their data."""
        features = self.json.get("features") or {}
        return [
            mm_hash
            for modality, hashes in (features.get("mm_hashes") or {}).items()
            for mm_hash, data in zip(
                hashes, (features.get("kwargs_data") or {}).get(modality) or [None] * len(hashes), strict=True
            )
            if data is not None
        ]


@dataclass
class Response:
    """What to send back. `chunks` instead of a body: each is sent, and flushed, by itself, in chunked encoding."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes | asyncio.Event] | None = None

    @property
    def json(self) -> Json:
        return json.loads(self.body)


def json_response(content: Json, status: int = 200) -> Response:
    return Response(status, json.dumps(content).encode(), {"content-type": "application/json"})


def error_response(status: int, message: str, kind: str, param: str | None = None) -> Response:
    """vLLM's error shape."""
    return json_response({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


class Channel:
    """The sending side of one connection, for the steps that misbehave on it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        """End it in good order (FIN)."""
        self._transport.close()

    def reset(self) -> None:
        """End it with a reset (RST), which throws away what the client has not read yet."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # on, for 0 seconds
        self._transport.abort()


async def send_response(response: Response, channel: Channel) -> None:
    channel.write(encoded_response(response))
    for chunk in response.chunks or ():
        if isinstance(chunk, asyncio.Event):
            await chunk.wait()
        elif chunk:
            channel.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    if response.chunks is not None:
        channel.write(b"0\r\n\r\n")


def encoded_response(response: Response) -> bytes:
    """The head, and the body unless it comes in chunks."""
    framing = (
        {"content-length": str(len(response.body))} if response.chunks is None else {"transfer-encoding": "chunked"}
    )
    headers = {"server": "uvicorn"} | framing | response.headers
    head = [f"HTTP/1.1 {response.status} Fake", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + response.body
