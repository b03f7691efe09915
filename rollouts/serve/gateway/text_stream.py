"""Sends the text of a completion while it is sampled."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

from renderers.parsing.response import ContentDelta, ReasoningDelta
from rollouts.engines.protocol import TokenDelta, TokenListener
from rollouts.engines.stop_strings import sendable_length
from rollouts.episodes.turns import Prompt
from rollouts.serve.bodies import event
from rollouts.serve.errors import ANSWERED, error_fields, request_error
from rollouts.serve.gateway.chat_request import ChatRequest
from rollouts.serve.gateway.completion_objects import SentText, TokenTexts, completion_events, delta_event
from rollouts.serve.gateway.completions import ChatCompletion, ListenerFactory


class TextStream:
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
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def events(self) -> AsyncIterator[bytes]:
        """The events. An error before the first one is raised; a later one is the last event, in OpenAI's form."""
        completing = asyncio.ensure_future(self._complete(self._listener))
        completing.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            while (sent := await self._events.get()) is not None:
                yield sent
            completion = replace(await completing, id=self._head.id, created=self._head.created)
            for last in completion_events(completion, self._chat, self._texts, self._sent):
                yield last
        except ANSWERED as error:
            if not self._sent:
                raise
            yield event(error_fields(request_error(error)))
        finally:
            completing.cancel()
            await asyncio.gather(completing, return_exceptions=True)

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
            self._events.put_nowait(delta_event(self._head, self._chat, index, role))
        if isinstance(piece, ReasoningDelta):
            sent.reasoning += piece.text
            delta = {"reasoning_content": piece.text}
        else:
            sent.content += piece.text
            delta = {"content": piece.text}
        self._events.put_nowait(delta_event(self._head, self._chat, index, delta))
