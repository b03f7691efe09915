"""Sends the text of a completion while it is sampled."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from renderers.parsing.response import ContentDelta, ReasoningDelta
from rollouts.engines.protocol import TokenDelta, TokenListener
from rollouts.engines.stop_strings import sendable_length
from rollouts.episodes.turns import Prompt
from rollouts.serve.errors import ANSWERED, logged_error
from rollouts.serve.gateway.completions import ListenerFactory
from rollouts.serve.gateway.dialect import Event, TurnCompletion, Writer

_KEYS = {ReasoningDelta: "reasoning_content", ContentDelta: "content"}


@dataclass(slots=True, eq=False)
class TurnStream:
    """The events of one request. Reasoning and content are sent as they are sampled, tool calls when they are complete.

    `complete` samples and records the completion, with a listener for its tokens. `keep` is called with it before
    the last events. Without a `renderer`, which parses tokens, all is sent when the completion is finished.
    """

    complete: Callable[[ListenerFactory | None], Coroutine[Any, Any, TurnCompletion]]
    keep: Callable[[TurnCompletion], None]
    writer: Writer
    renderer: Any
    _parsers: dict[int, Any] = field(default_factory=dict)
    _held: dict[int, tuple[str, str]] = field(default_factory=dict)  # keys, and what may begin a stop string
    _events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    _has_begun: bool = False

    async def events(self) -> AsyncIterator[bytes]:
        """The events. An error before the first one is raised; a later one is the last event."""
        listener = None if self.renderer is None else self._listener
        completing = asyncio.ensure_future(self.complete(listener))
        completing.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            while (sent := await self._events.get()) is not None:
                yield self.writer.encoded(sent)
            completion = await completing
            self._begin(completion.prompt_ids)
            self._put(self.writer.rest(completion))
            self.keep(completion)
            while not self._events.empty():
                if (last := self._events.get_nowait()) is not None:
                    yield self.writer.encoded(last)
            yield self.writer.last
        except ANSWERED as error:
            if not self._has_begun:
                raise
            name = f"a stream of the session {self.writer.head.session_id}"
            yield self.writer.encoded(self.writer.failed(logged_error(error, name)))
        finally:
            completing.cancel()
            await asyncio.gather(completing, return_exceptions=True)

    def _listener(self, prompt: Prompt) -> TokenListener:
        prompt_ids = prompt.rendered.token_ids

        def listen(delta: TokenDelta) -> None:
            index = delta.index
            if index not in self._parsers:
                self._parsers[index] = self.renderer.response_parser(tools=prompt.tools, prompt_ids=prompt_ids)
            for piece in self._parsers[index].feed(delta.token_ids.tolist()):
                if isinstance(piece, ReasoningDelta | ContentDelta) and piece.text:
                    self._begin(prompt_ids)
                    self._send_or_hold(index, _KEYS[type(piece)], piece.text)

        return listen

    def _send_or_hold(self, index: int, key: str, new: str) -> None:
        held_key, text = self._held.pop(index, (key, ""))
        if held_key != key:
            self._put(self.writer.send(index, held_key, text))
            text = ""
        text += new
        begun = self.writer.sent.get(index, Counter())[key]
        length = sendable_length(text, self.writer.request.stop, is_beginning=not begun)
        self._held[index] = key, text[length:]
        self._put(self.writer.send(index, key, text[:length]))

    def _begin(self, prompt_ids: list[int]) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._put(self.writer.begin(prompt_ids))

    def _put(self, events: Iterable[Event]) -> None:
        for each in events:
            self._events.put_nowait(each)
