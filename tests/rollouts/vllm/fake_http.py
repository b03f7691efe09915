"""HTTP of `FakeVLLM`: requests as received, responses, and connections, on which a step may misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Json = Any


@dataclass(eq=False)
class Seen:
    """A request as it came. `connection` numbers the connections; `disconnected` is set when its connection ends."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    connection: int
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
        hashes = (features.get("mm_hashes") or {}).get("image") or []
        data = (features.get("kwargs_data") or {}).get("image") or [None] * len(hashes)
        return [mm_hash for mm_hash, item in zip(hashes, data, strict=True) if item is not None]


@dataclass
class Response:
    """What to send back. `chunks` instead of a body: each is sent, and flushed, by itself, in chunked encoding."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes | asyncio.Event] | None = None


def json_response(content: Json, status: int = 200) -> Response:
    return Response(status, json.dumps(content).encode(), {"content-type": "application/json"})


def error_response(status: int = 500, message: str = "it broke", kind: str = "x", param: str | None = None) -> Response:
    """vLLM's error shape."""
    return json_response({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def event_stream(*chunks: bytes | asyncio.Event) -> Response:
    """A stream of these chunks; an event between them is waited for."""
    return Response(headers={"content-type": "text/event-stream; charset=utf-8"}, chunks=[*chunks])


class Connection(asyncio.Protocol):
    """Reads requests, one at a time, and calls `handle` with each; its end ends the request that is being answered."""

    def __init__(self, number: int, handle: Callable[[Seen, Connection], Coroutine[Any, Any, None]]) -> None:
        self.task: asyncio.Task[None] | None = None
        self.is_open = False
        self._number = number
        self._handle = handle
        self._received = bytearray()
        self._seen: list[Seen] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        for seen in self._seen:
            seen.disconnected.set()
        if self.task is not None:
            self.task.cancel()

    def _next(self) -> None:
        if self.task is not None and not self.task.done():
            return
        if (end := self._received.find(b"\r\n\r\n")) < 0:
            return
        first, *lines = self._received[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = end + 4 + int(headers.get("content-length", 0))
        if len(self._received) < size:
            return
        body = bytes(memoryview(self._received)[end + 4 : size])
        del self._received[:size]
        method, target, _ = first.split(" ")
        parts = urlsplit(target)
        seen = Seen(method, parts.path, dict(parse_qsl(parts.query)), headers, body, self._number)
        self._seen.append(seen)
        self.task = asyncio.get_running_loop().create_task(self._handle(seen, self))
        self.task.add_done_callback(lambda task: None if task.cancelled() else self._next())

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def send(self, response: Response) -> None:
        length = {"content-length": str(len(response.body))}
        framing = length if response.chunks is None else {"transfer-encoding": "chunked"}
        headers = {"server": "uvicorn"} | framing | response.headers
        head = [f"HTTP/1.1 {response.status} Fake", *(f"{name}: {value}" for name, value in headers.items())]
        self.write("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + response.body)
        for chunk in response.chunks or ():
            if isinstance(chunk, asyncio.Event):
                await chunk.wait()
            elif chunk:
                self.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        if response.chunks is not None:
            self.write(b"0\r\n\r\n")

    def close(self) -> None:
        """End it in good order (FIN)."""
        self._transport.close()

    def reset(self) -> None:
        """End it with a reset (RST), which throws away what the client has not read yet."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # on, for 0 seconds
        self._transport.abort()
