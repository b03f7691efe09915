"""A chat-completions server that sends given responses, and the form of OpenAI's."""

import json
from collections.abc import Callable
from typing import Any

from served_in_thread import ServedInThread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


def completion(content: Any = "fine", *, finish_reason: Any = "stop", usage: Any = None, **message: Any) -> Any:
    """The body of a chat completion with one choice."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "model-of-the-server",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **message},
                "logprobs": None,
                "finish_reason": finish_reason,
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10} if usage is None else usage,
    }


def call(arguments: Any, name: Any = "look", call_id: Any = "id-1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def failure(status: int, message: str, *, headers: dict[str, str] | None = None, **fields: Any) -> Response:
    """An error as OpenAI and vLLM send it."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None, **fields}
    return JSONResponse({"error": error}, status, headers)


class ChatServer(ServedInThread):
    """Sends the responses in order, the last one for all further requests, and keeps the requests.

    `models` is the response to a request for the list of models. A response is a body, a `Response`, or a function of
    the body of the request that returns one of these.
    """

    def __init__(self, *responses: Any, models: Response | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._responses = list(responses)
        route = Route("/v1/chat/completions", self._answer, methods=["POST"])
        listing = Route("/v1/models", lambda request: models or JSONResponse({"data": []}))
        super().__init__(Starlette(routes=[route, listing]))
        self.url = f"{self.base_url}/v1"

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        response = self._responses.pop(0) if len(self._responses) > 1 else self._responses[0]
        if isinstance(response, Callable) and not isinstance(response, Response):  # a Response can be called, too
            response = response(body)
        return response if isinstance(response, Response) else JSONResponse(response)
