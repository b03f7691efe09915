"""Bodies of requests and events of responses: bounded, parsed off the loop; a client that goes away."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from rollouts.calls import parse_body
from rollouts.errors import short_repr, validation_errors
from rollouts.serve.errors import RequestError, invalid_field

#: More values than messages, schemas and options of a request have.
MAX_JSON_VALUES: Final = 2**22

# Other threads run between two of them: counting holds the interpreter's lock.
_CHUNK_BYTES: Final = 2**20


def has_more_values(data: bytes, limit: int) -> bool:
    """Whether the JSON text may have more than `limit` values in its lists and objects, told by its commas.

    Commas in texts count too, so that limits need room for those. Parsing holds the interpreter's lock, also
    on a thread, for about 0.2 s for each million of values, and takes up to 100 bytes for each byte of the
    text.
    """
    commas = 0
    for start in range(0, len(data), _CHUNK_BYTES):
        commas += data.count(b",", start, start + _CHUNK_BYTES)
        if commas >= limit:
            return True
    return False


#: Deepest nesting of schemas of tools and of arguments. Templates walk through them recursively.
_MAX_DEPTH: Final = 64

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, read: Callable[[bytes], T], *, only_json: bool = True) -> T:
    """What `read` makes of the body of a request; of a large one, on a thread.

    `only_json` refuses bodies that are not declared as JSON: browsers send other content types to foreign
    servers without asking. Raises `RequestError`, and what `read` raises.
    """
    content_type = request.headers.get("content-type", "")
    if only_json and content_type.partition(";")[0].strip().lower() != "application/json":
        message = f"Unsupported Media Type {content_type[:100]!r}: Only 'application/json' is allowed"
        raise RequestError(415, message, code="unsupported_media_type")
    data = await request.body()
    return await parse_body(len(data), read, data)


async def read_model(request: Request, kind: type[Body]) -> Body:
    """The JSON body of a request as an object of `kind`. Raises `RequestError` (400)."""
    return await read_body(request, lambda data: validated(kind, _loads(data)))


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request. Raises `RequestError` (400)."""
    return await read_body(request, json_object)


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises `RequestError` (400)."""
    value = _loads(data)
    if not isinstance(value, dict):
        raise RequestError(400, "the body is not a JSON object")
    return value


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null: null says in each API that a field is left out."""
    return {name: value for name, value in fields.items() if value is not None}


class Strict(BaseModel):
    """An object of a body that has no other fields than its own and those `without_effect` on the completion."""

    model_config = ConfigDict(strict=True, extra="forbid")
    without_effect: ClassVar[frozenset[str]] = frozenset()
    #: The fields whose value, or whose elements, are of several types: pydantic has the type behind them.
    typed: ClassVar[Collection[str]] = ("arguments", "content", "output", "source")

    @model_validator(mode="before")
    @classmethod
    def _with_effect(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # Null says in each API that a field is left out.
        return {name: each for name, each in value.items() if each is not None and name not in cls.without_effect}


def validated(kind: type[Body], value: Any, place: str = "") -> Body:
    """The value at a place of the body as an object of `kind`.

    Raises `RequestError` with the place and the value of the first error; the description of a field is the reason.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _invalid_body(error, kind, place) from None


#: In place of pydantic's messages, by its types of errors.
_MESSAGES: Final = {
    "model_type": "Input should be an object",
    "none_required": "leave it out",
    "string_pattern_mismatch": "this value is not supported",
}


def _invalid_body(error: ValidationError, kind: type[BaseModel], place: str) -> RequestError:
    typed = kind.typed if issubclass(kind, Strict) else ()
    first = validation_errors(error)[0]
    loc: tuple[Any, ...] = first["loc"]
    parts = [
        part
        for at, part in enumerate(loc)
        if not at or isinstance(part, int) or loc[at - 1 - isinstance(loc[at - 1], int)] not in typed
    ]
    place += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    place = place.removeprefix(".")
    if first["type"] == "extra_forbidden":
        return unknown_field(place)
    value = "missing" if first["type"] == "missing" else short_repr(first["input"])
    message, context = _MESSAGES.get(first["type"], first["msg"]), first.get("ctx", {})
    if first["type"] == "union_tag_invalid":
        message = f"the type {short_repr(context['tag'])} is not supported; it is one of {context['expected_tags']}"
    elif context.get("max_length") == 0:
        message = _MESSAGES["none_required"]
    field = kind.model_fields.get(str(loc[0])) if loc else None
    reason = f" ({field.description})" if field is not None and field.description else ""
    return invalid_field(f"{place or 'the body'} is {value}: {message}{reason}", place)


def check_encodable(value: Any, place: str) -> None:
    """Refuse what no JSON in UTF-8 can hold, so that no response could. Raises `RequestError`."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        reason = "half of a surrogate pair, a number beyond 1.8e308, or too many levels"
        raise invalid_field(f"{place} cannot be written as JSON again: {reason}", place) from None


def check_depth(value: Any, place: str) -> None:
    """Refuse what is nested too deep for a template. Raises `RequestError`."""
    if _deeper_than(value, _MAX_DEPTH):
        raise invalid_field(f"{place} is nested deeper than {_MAX_DEPTH} levels", place)


def _deeper_than(value: Any, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_deeper_than(child, depth - 1) for child in children)


def unknown_field(name: str) -> RequestError:
    return invalid_field(f"unknown field {short_repr(name)[1:-1]}; leave it out", name[:80])


def _loads(data: bytes) -> Any:
    if has_more_values(data, MAX_JSON_VALUES):
        reason = f"the body has more than {MAX_JSON_VALUES} commas, more than any request needs; shorten it"
        raise RequestError(400, reason)
    try:
        return json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        reason = "it is nested too deep"
    except ValueError as error:  # also of bytes that are no UTF-8, and of integers with thousands of digits
        reason = short_repr(str(error), 200)[1:-1]
    raise RequestError(400, f"the body is not JSON: {reason}", "body")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
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


async def streamed_response(
    request: Request, events: AsyncIterator[bytes], headers: Mapping[str, str] | None = None
) -> Response:
    """The response of a stream, begun with its first event: errors before it have their HTTP status."""
    first = await unless_disconnected(request, anext(events))

    async def all_events() -> AsyncIterator[bytes]:
        yield first
        async for following in events:
            yield following

    return StreamingResponse(all_events(), media_type="text/event-stream", headers=headers)


def event(content: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event of a streamed response."""
    data = f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
    return (data if name is None else f"event: {name}\n{data}").encode()


END_OF_STREAM: Final = b"data: [DONE]\n\n"
