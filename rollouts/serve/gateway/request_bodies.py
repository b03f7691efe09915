"""Reading the bodies of requests within limits, and noticing that a client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from rollouts.serve.gateway.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientDisconnectedError,
    ContentTypeError,
)
from rollouts.serve.gateway.limits import GatewayLimits

T = TypeVar("T")


async def read_body(request: Request, limits: GatewayLimits) -> bytes:
    """The body of a JSON request. Raises a `GatewayError`.

    Browsers send other content types to foreign servers without asking, JSON only where the server allows it.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ContentTypeError(content_type)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.max_body_bytes:
        raise BodyTooLargeError(limits.max_body_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.max_body_bytes:
                    raise BodyTooLargeError(limits.max_body_bytes)
                chunks.append(chunk)
    except TimeoutError:
        raise BodyTimeoutError(limits.body_seconds) from None
    except ClientDisconnect:
        raise ClientDisconnectedError("") from None
    return b"".join(chunks)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T], session_id: str) -> T:
    """The result of `work`, which is cancelled if the client closes the connection. The body must have been read.

    Raises `ClientDisconnectedError`, and what `work` raises.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError(session_id)
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def disconnected(request: Request) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
