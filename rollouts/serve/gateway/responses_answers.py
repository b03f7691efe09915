"""Answers in the form of OpenAI's Responses: the `response` object, or its stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rollouts.serve.errors import RequestError
from rollouts.serve.gateway.dialect import Choice, Dialect, Event, TurnCompletion, Writer
from rollouts.serve.gateway.responses_request import ResponsesRequest, read_responses_request

_TYPES: Final = {"reasoning_content": "reasoning", "content": "message"}


class ResponsesWriter(Writer):
    """The output of the response grows with its events."""

    request: ResponsesRequest
    _sequence_number = -1
    _texts: list[str]  # of the last item, until it ends

    def begin(self, prompt_ids: list[int]) -> Iterator[Event]:
        self._texts = []
        self.answer = {
            "id": f"resp_{self.head.id}",
            "object": "response",
            "created_at": self.head.created,
            "model": self.head.model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self.request.echoed,
        }
        yield self._event("response.created", response={**self.answer, "output": []})
        yield self._event("response.in_progress", response={**self.answer, "output": []})

    def text(self, index: int, key: str, text: str) -> Iterator[Event]:
        kind = _TYPES[key]
        if not self._texts or self._item["type"] != kind:
            yield from self._end_text()
            yield from self._begin_text(kind)
        self._texts.append(text)
        yield self._part_event(f"{self._text_type}.delta", delta=text, **self._logprobs())

    def call(self, index: int, number: int, call: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._end_text()
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"type": "function_call", "call_id": call["id"], "name": name, "arguments": ""}
        if name in self.request.namespaces:
            item["namespace"], item["name"] = self.request.namespaces[name]
        yield self._begin_item("fc", item)
        yield self._item_event("function_call_arguments.delta", delta=arguments)
        yield self._item_event("function_call_arguments.done", arguments=arguments)
        yield self._end_item({**item, "arguments": arguments})

    def end_choice(self, choice: Choice) -> Iterator[Event]:
        if not self.answer["output"]:
            yield from self._begin_text("message")
        yield from self._end_text("incomplete" if choice.is_cut else "completed")
        self.answer["status"] = "incomplete" if choice.is_cut else "completed"
        self.answer["incomplete_details"] = {"reason": "max_output_tokens"} if choice.is_cut else None

    def end(self, completion: TurnCompletion) -> Iterator[Event]:
        prompt, sampled = len(completion.prompt_ids), completion.num_sampled
        self.answer["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
        yield self._event(f"response.{self.answer['status']}", response=self.answer)

    def failed(self, error: RequestError) -> Event:
        reason = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response={**self.answer, "status": "failed", "error": reason})

    @property
    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self.answer["output"][-1]
        return item

    @property
    def _text_type(self) -> str:
        return "reasoning_text" if self._item["type"] == "reasoning" else "output_text"

    def _event(self, name: str, **fields: Any) -> Event:
        self._sequence_number += 1
        return {"type": name, "sequence_number": self._sequence_number, **fields}

    def _item_event(self, name: str, **fields: Any) -> Event:
        position = len(self.answer["output"]) - 1
        return self._event(f"response.{name}", output_index=position, item_id=self._item["id"], **fields)

    def _part_event(self, name: str, **fields: Any) -> Event:
        return self._item_event(name, content_index=0, **fields)

    def _begin_item(self, prefix: str, item: dict[str, Any]) -> Event:
        output = self.answer["output"]
        output.append({"id": f"{prefix}_{self.head.id}_{len(output)}", "status": "in_progress", **item})
        return self._event("response.output_item.added", output_index=len(output) - 1, item=output[-1])

    def _end_item(self, item: dict[str, Any], status: str = "completed") -> Event:
        output = self.answer["output"]
        output[-1] = {**output[-1], **item, "status": status}
        return self._event("response.output_item.done", output_index=len(output) - 1, item=output[-1])

    def _begin_text(self, kind: str) -> Iterator[Event]:
        if kind == "reasoning":
            item = {"type": "reasoning", "summary": [], "content": []}
            yield self._begin_item("rs", item)
        else:
            yield self._begin_item("msg", {"type": "message", "role": "assistant", "content": []})
        yield self._part_event("content_part.added", part=self._part(""))

    def _part(self, text: str) -> dict[str, Any]:
        part = {"type": self._text_type, "text": text, **self._logprobs()}
        return {**part, "annotations": []} if self._text_type == "output_text" else part

    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._text_type == "output_text" else {}

    def _end_text(self, status: str = "completed") -> Iterator[Event]:
        """End the item of text or reasoning that is open, if there is one."""
        if not self.answer["output"] or self._item["status"] != "in_progress":
            return
        text, self._texts = "".join(self._texts), []
        yield self._part_event(f"{self._text_type}.done", text=text, **self._logprobs())
        yield self._part_event("content_part.done", part=self._part(text))
        yield self._end_item({"content": [self._part(text)]}, status)


RESPONSES: Final = Dialect("responses", read_responses_request, ResponsesWriter)
