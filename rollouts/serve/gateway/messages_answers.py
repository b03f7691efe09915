"""Answers in the form of Anthropic's Messages: the `message` object, or its stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rollouts.serve.errors import RequestError, messages_error_fields
from rollouts.serve.gateway.dialect import Choice, Dialect, Event, TurnCompletion, Writer
from rollouts.serve.gateway.messages_request import read_messages_request

_KINDS: Final = {"reasoning_content": "thinking", "content": "text"}


class MessagesWriter(Writer):
    """The blocks of the message grow with its events. A signature has no meaning here, and is never read."""

    _texts: list[str]  # of the last block, until it ends

    def begin(self, prompt_ids: list[int]) -> Iterator[Event]:
        self._texts = []
        self.answer = {
            "id": f"msg_{self.head.id}",
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(prompt_ids), "output_tokens": 0},
        }
        yield {"type": "message_start", "message": {**self.answer, "content": []}}
        yield {"type": "ping"}

    def text(self, index: int, key: str, text: str) -> Iterator[Event]:
        kind = _KINDS[key]
        if not self._texts or self.answer["content"][-1]["type"] != kind:
            yield from self._end_block()
            yield self._begin_block({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._texts.append(text)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def call(self, index: int, number: int, call: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._end_block()
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        yield self._begin_block({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        self.answer["content"][-1]["input"] = json.loads(arguments)
        yield self._event("content_block_stop")

    def end_choice(self, choice: Choice) -> Iterator[Event]:
        yield from self._end_block()
        calls = choice.message.get("tool_calls")
        stopped = "stop_sequence" if choice.stop else "tool_use" if calls else "end_turn"
        self.answer["stop_reason"] = "max_tokens" if choice.is_cut else stopped
        self.answer["stop_sequence"] = choice.stop

    def end(self, completion: TurnCompletion) -> Iterator[Event]:
        usage = {**self.answer["usage"], "output_tokens": completion.num_sampled}
        self.answer["usage"] = usage
        ending = {name: self.answer[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ending, "usage": usage}
        yield {"type": "message_stop"}

    def failed(self, error: RequestError) -> Event:
        return messages_error_fields(error)

    def _begin_block(self, block: dict[str, Any]) -> Event:
        self.answer["content"].append(block)
        return self._event("content_block_start", content_block=block.copy())

    def _delta(self, delta: dict[str, Any]) -> Event:
        return self._event("content_block_delta", delta=delta)

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": name, "index": len(self.answer["content"]) - 1, **fields}

    def _end_block(self) -> Iterator[Event]:
        """End the block of text or thinking that is open, if there is one."""
        if not self._texts:
            return
        block = self.answer["content"][-1]
        block[block["type"]] = "".join(self._texts)
        self._texts = []
        if block["type"] == "thinking":
            block["signature"] = self.head.id
            yield self._delta({"type": "signature_delta", "signature": self.head.id})
        yield self._event("content_block_stop")


MESSAGES: Final = Dialect("messages", read_messages_request, MessagesWriter)
