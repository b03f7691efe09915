"""Bodies of requests: read with a bound, parsed off the loop, a client that goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from rollouts.serve.errors import RequestError

#: More values than messages, schemas and options of a request have.
MAX_JSON_VALUES: Final = 2**22

# Other threads run between two of them: counting holds the interpreter's lock.
_CHUNK_BYTES: Final = 2**20


def has_more_values(data: bytes, limit: int) -> bool:
    """Whether the JSON text may have more than `limit` values in its lists and objects, told by its commas.

    Commas in texts count too, so that limits need room for those. Parsing holds the interpreter's lock, also on a
    thread, for about 0.2 s for each million of values, and takes up to 100 bytes for each byte of the text.
    """
    commas = 0
    for start in range(0, len(data), _CHUNK_BYTES):
        commas += data.count(b",", start, start + _CHUNK_BYTES)
        if commas >= limit:
            return True
    return False


# A body of more bytes is parsed in a thread, because parsing it would delay the other requests of the loop.
_LARGE_BODY = 256 * 2**10
# Errors that are listed, and the characters of each: an error quotes the value.
_MAX_LISTED_ERRORS = 10
_MAX_ERROR_CHARACTERS = 1000

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, kind: type[Body], max_values: int = MAX_JSON_VALUES) -> Body:
    """The JSON body of a request as an object of `kind`. Raises `RequestError` (400).

    A body with more than `max_values` commas is refused before it is parsed.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestError(400, _listed(["Unsupported Media Type: Only 'application/json' is allowed"]), "Bad Request")
    return await _by_size(await request.body(), partial(_parse, kind=kind, max_values=max_values))


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request of any media type. Raises `RequestError` (400)."""
    content = await _by_size(await request.body(), partial(_loads, max_values=MAX_JSON_VALUES))
    if not isinstance(content, dict):
        raise RequestError(400, "Request body must be a JSON object", "Bad Request")
    return content


async def _by_size(data: bytes, read: Callable[[bytes], T]) -> T:
    return await asyncio.to_thread(read, data) if len(data) > _LARGE_BODY else read(data)


def _parse(data: bytes, kind: type[Body], max_values: int) -> Body:
    try:
        return kind.model_validate(_loads(data, max_values))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        places = [".".join(["body", *map(str, each["loc"])]) for each in found]
        lines = [str({**each, "loc": place})[:_MAX_ERROR_CHARACTERS] for each, place in zip(found, places, strict=True)]
        raise RequestError(400, _listed(lines), "Bad Request", places[0]) from error


def _loads(data: bytes, max_values: int) -> Any:
    if has_more_values(data, max_values):
        raise RequestError(400, f"The body has more than {max_values} commas, more than any request needs. Shorten it.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        lines = [str({"type": "json_invalid", "loc": "body", "msg": f"JSON decode error: {error}"})]
        raise RequestError(400, _listed(lines), "Bad Request", "body") from error


def _listed(lines: list[str]) -> str:
    """The text that vLLM makes of validation errors."""
    noun = "error" if len(lines) == 1 else "errors"
    shown = [f"  {line}" for line in lines[:_MAX_LISTED_ERRORS]]
    if len(lines) > len(shown):
        shown.append(f"  ...and {len(lines) - len(shown)} more {noun}")
    return "\n".join([f"{len(lines)} validation {noun}:", *shown])


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects; then raises `ClientDisconnect`.

    The body of the request must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait([task, gone])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
