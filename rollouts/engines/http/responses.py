"""A whole response of a server, and the error for one that reports an error."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from rollouts.engines.http.address import redacted
from rollouts.engines.protocol import WeightSpan
from rollouts.errors import EngineError, MalformedResultError, ServerError

_EXCERPT_CHARACTERS = 2000
#: Texts in messages of vLLM.
_CURES: Mapping[str, str] = {
    "EngineCore encountered an issue": (
        "the server's engine has died and the server ends; its log has the cause. Start it again"
    ),
    "greater than max allowed": "ask for fewer likeliest tokens, or start the server with a larger --max-logprobs",
    "may be provided in one prompt": "put fewer into a prompt, or start the server with more in --limit-mm-per-prompt",
}


class HttpResponse(NamedTuple):
    """A whole response. `headers` ignores case; `name` is that of the request, `sent` the bytes of its body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    name: str = "response"
    sent: int = 0

    def json(self) -> Any:
        """The decoded body. Raises `MalformedResultError`."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise MalformedResultError(
                self.name, f"the response (HTTP {self.status}) is not JSON ({error}): {excerpt(self.body)!r}"
            ) from None


@contextmanager
def reading(name: str, failure: str, kind: type[EngineError] = MalformedResultError) -> Iterator[None]:
    """Turn what a block raises that reads a response of another form into an error of request `name`.

    with reading(name, "`output_ids` cannot be read"):
        ids = np.array(content["output_ids"])
    """
    try:
        yield
    except (AttributeError, EOFError, LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        raise kind(name, f"{failure} ({error!r})") from error


def response_error(name: str, response: HttpResponse, action: str) -> ServerError:
    """The error for an error response: the failed `action`, the status, and the server's message.

    Reads vLLM's `{"error": {"message", ...}}`, its control routes' `{"error": text}` and FastAPI's
    `{"detail": ...}`. Other bodies are quoted from their beginning. Credentials are removed.
    """
    message = _message(response.body)
    if response.status == 413 or "length limit exceeded" in message:  # as vLLM's Rust frontend says it
        action += (
            f" (the request has {response.sent} bytes; vLLM's Rust frontend takes 32 MiB unless it was "
            "started with another VLLM_HTTP_MAX_REQUEST_BODY_SIZE, in bytes: raise it, or send fewer or "
            "smaller images)"
        )
    return server_error(name, action, response.status, message)


def server_error(name: str, action: str, status: int, message: str) -> ServerError:
    """The error for a server's message, with its cure where the message is a known one."""
    action += "".join(f" ({cure})" for text, cure in _CURES.items() if text in message)
    return ServerError(name, action, status=status, body=message)


def _message(body: bytes) -> str:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return excerpt(body) or "(no body)"
    if isinstance(content, dict):
        error = content.get("error") or content.get("detail") or content.get("message")
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            kind = error.get("type")
            error = f"{kind}: {error['message']}" if isinstance(kind, str) else error["message"]
        elif isinstance(error, list) and all(isinstance(item, dict) and "msg" in item for item in error):
            error = "; ".join(f"{'.'.join(map(str, item.get('loc') or ()))}: {item['msg']}" for item in error)
        if isinstance(error, str):
            return excerpt(error.encode("utf-8", "replace"))
    return excerpt(body)


def excerpt(body: bytes) -> str:
    """The beginning of a body, without credentials, at most 2,000 characters."""
    text = redacted(body[: 4 * _EXCERPT_CHARACTERS].decode("utf-8", "replace"))
    return text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}... ({len(body)} bytes)"


def reported_spans(name: str, versions: Any, count: int) -> tuple[WeightSpan, ...]:
    """The spans of `count` tokens. Raises `MalformedResultError` for request `name`."""
    with reading(name, "weight versions cannot be read"):
        spans = tuple(WeightSpan(str(v["version"]), int(v["start"]), int(v["end"])) for v in versions)
    starts, ends = [*(span.start for span in spans), count], [0, *(span.end for span in spans)]
    if starts != ends:
        raise MalformedResultError(name, f"weight versions {spans} do not cover the {count} tokens of a sample")
    return tuple(span for span in spans if span.end > span.start)
