"""Whole answers of a server, and the error that an answer becomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollouts.engines.vllm.http.server_address import redacted
from rollouts.errors import MalformedResultError, ServerError

_SHOWN_CHARACTERS = 2000

#: How vLLM answers while it shuts itself down.
_ENGINE_DEAD = "EngineCore encountered an issue"


class HttpResponse(NamedTuple):
    """A whole answer. Header names are in lower case; `name` is that of the request."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    name: str = "answer"

    def json(self) -> Any:
        """The decoded body. Raises `MalformedResultError`."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise MalformedResultError(
                self.name, f"the answer (HTTP {self.status}) is no JSON ({error}): {shown(self.body)!r}"
            ) from None


def response_error(name: str, reply: HttpResponse, doing: str) -> ServerError:
    """The error for an answer that is one: what was being done, the status, and what the server said about it.

    Knows vLLM's `{"error": {"message", ...}}`, its control routes' `{"error": text}` and FastAPI's `{"detail": ...}`;
    other bodies are quoted from their beginning. Credentials are taken out.
    """
    return server_error(name, doing, reply.status, _message(reply.body))


def server_error(name: str, doing: str, status: int, message: str) -> ServerError:
    """The error for what a server said, with what to do where its engine has died."""
    if _ENGINE_DEAD in message:
        doing += " (its engine has died and it ends; its log has the cause. Start it again)"
    return ServerError(name, doing, status=status, body=message)


def shown(body: bytes) -> str:
    """The beginning of a body, fit for an error."""
    text = redacted(body[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "replace"))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(body)} bytes)"


def _message(body: bytes) -> str:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return shown(body) or "(no body)"
    if isinstance(content, dict):
        said = content.get("error") or content.get("detail") or content.get("message")
        if isinstance(said, dict) and isinstance(said.get("message"), str):
            kind = said.get("type")
            return shown((f"{kind}: {said['message']}" if isinstance(kind, str) else said["message"]).encode())
        if isinstance(said, str):
            return shown(said.encode("utf-8", "replace"))
        if isinstance(said, list) and all(isinstance(item, dict) and "msg" in item for item in said):
            places = [f"{'.'.join(map(str, item.get('loc', ())))}: {item['msg']}" for item in said]
            return shown("; ".join(places).encode("utf-8", "replace"))
    return shown(body)
