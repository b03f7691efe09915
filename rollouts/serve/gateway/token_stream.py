"""Completions that are sent as server-sent events while the engine samples them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from renderers import RendererError
from renderers.parsing.response import ContentDelta, ReasoningDelta
from rollouts.engines.protocol import TokenDelta, TokenListener
from rollouts.episodes.turns import Prompt
from rollouts.errors import RolloutsError
from rollouts.serve.gateway.chat_request import ChatRequest
from rollouts.serve.gateway.completions import ChatCompletion, ListenerFactory
from rollouts.serve.gateway.error_responses import error_response
from rollouts.serve.gateway.errors import ClientDisconnectedError
from rollouts.serve.gateway.request_bodies import disconnected
from rollouts.serve.gateway.responses import SentText, TokenTexts, completion_events, text_event
from rollouts.serve.gateway.stop_strings import sendable_length


class TokenStream:
    """The events of one request. Reasoning and content are sent as they are sampled, tool calls when they are complete.

    `complete` samples and records the completion, with a listener for its tokens.
    """

    def __init__(
        self,
        complete: Callable[[ListenerFactory], Coroutine[Any, Any, ChatCompletion]],
        chat: ChatRequest,
        renderer: Any,
        texts: TokenTexts | None,
        model: str,
        session_id: str,
    ) -> None:
        self._complete = complete
        self._chat = chat
        self._renderer = renderer
        self._texts = texts
        self._head = ChatCompletion(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model, session_id, [], [])
        self._sent: dict[int, SentText] = {}
        self._parsers: dict[int, Any] = {}
        self._held: dict[int, ReasoningDelta | ContentDelta] = {}  # text with which a stop string may begin
        self._events: asyncio.Queue[str | None] = asyncio.Queue()

    async def events(self, request: Request) -> AsyncIterator[str]:
        """The events. An error before the first one is raised; a later one is the last event, in OpenAI's form."""
        completing = asyncio.ensure_future(self._complete(self._listener))
        completing.add_done_callback(lambda _: self._events.put_nowait(None))
        gone = asyncio.ensure_future(disconnected(request))
        gone.add_done_callback(lambda _: completing.cancel())
        try:
            while (event := await self._events.get()) is not None:
                yield event
            if completing.cancelled():
                raise ClientDisconnectedError(self._head.session_id)
            completion = replace(completing.result(), id=self._head.id, created=self._head.created)
            for event in completion_events(completion, self._chat, self._texts, self._sent):
                yield event
        except (RolloutsError, RendererError) as error:
            if not self._sent:
                raise
            yield f"data: {json.dumps(json.loads(bytes(error_response(error).body)))}\n\n"
        finally:
            for task in (completing, gone):
                task.cancel()
            await asyncio.gather(completing, gone, return_exceptions=True)

    def _listener(self, prompt: Prompt) -> TokenListener:
        def listen(delta: TokenDelta) -> None:
            index = delta.index
            if index not in self._parsers:
                self._parsers[index] = self._renderer.response_parser(
                    tools=prompt.tools, prompt_ids=prompt.rendered.token_ids
                )
            for piece in self._parsers[index].feed(delta.token_ids.tolist()):
                if isinstance(piece, ReasoningDelta | ContentDelta) and piece.text:
                    self._send_or_hold(index, piece)

        return listen

    def _send_or_hold(self, index: int, piece: ReasoningDelta | ContentDelta) -> None:
        held = self._held.pop(index, None)
        if held is not None and type(held) is type(piece):
            piece = replace(piece, text=held.text + piece.text)
        elif held is not None:
            self._send(index, held)
        sent = self._sent.get(index, SentText())
        begun = sent.reasoning if isinstance(piece, ReasoningDelta) else sent.content
        length = sendable_length(piece.text, self._chat.stop, is_beginning=not begun)
        if length < len(piece.text):
            self._held[index] = replace(piece, text=piece.text[length:])
        if length:
            self._send(index, replace(piece, text=piece.text[:length]))

    def _send(self, index: int, piece: ReasoningDelta | ContentDelta) -> None:
        sent = self._sent.get(index)
        if sent is None:
            sent = self._sent[index] = SentText()
            role = {"role": "assistant", "content": ""}
            self._events.put_nowait(text_event(self._head, self._chat, index, role))
        if isinstance(piece, ReasoningDelta):
            sent.reasoning += piece.text
            delta = {"reasoning_content": piece.text}
        else:
            sent.content += piece.text
            delta = {"content": piece.text}
        self._events.put_nowait(text_event(self._head, self._chat, index, delta))


async def streamed_response(request: Request, stream: TokenStream, headers: dict[str, str]) -> Response:
    """The response of a stream, which begins with its first event: errors before it have their HTTP status."""
    events = stream.events(request)
    first = await anext(events)

    async def all_events() -> AsyncIterator[str]:
        yield first
        async for event in events:
            yield event

    return StreamingResponse(all_events(), media_type="text/event-stream", headers=headers)
