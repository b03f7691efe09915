"""Chat completions as OpenAI's API writes them: the `chat.completion` object, or its chunks as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from rollouts.serve.bodies import END_OF_STREAM, event
from rollouts.serve.errors import RequestError, error_fields, unsupported_field
from rollouts.serve.gateway.chat_request import ChatRequest, read_chat_request
from rollouts.serve.gateway.dialect import Choice, Dialect, Event, Head, TokenTexts, TurnCompletion, Writer


class ChatWriter(Writer):
    """Each choice has the index of its `turn`, the object its `session_id`.

    Each part of a message is one chunk: role, reasoning, content, and the name and the arguments of each tool
    call. Log-probabilities and token ids are in the last chunk of their choice.
    """

    request: ChatRequest
    last: ClassVar[bytes] = END_OF_STREAM
    _first: dict[str, Any]  # fields of the next chunk alone

    def __init__(self, request: ChatRequest, head: Head, texts: TokenTexts | None) -> None:
        if request.logprobs and texts is None:
            raise unsupported_field("this renderer has no tokenizer for logprobs; use return_token_ids", "logprobs")
        super().__init__(request, head, texts)

    def whole(self, completion: TurnCompletion) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [self._entry(choice, message=_message(choice.message)) for choice in completion.choices],
            "usage": _usage(completion),
            **self._prompt_ids(completion.prompt_ids),
        }

    def begin(self, prompt_ids: list[int]) -> Iterator[Event]:
        self._first = self._prompt_ids(prompt_ids)
        return iter(())

    def begin_choice(self, index: int) -> Iterator[Event]:
        yield self._delta(index, {"role": "assistant", "content": ""})

    def text(self, index: int, key: str, text: str) -> Iterator[Event]:
        yield self._delta(index, {key: text})

    def call(self, index: int, number: int, call: Mapping[str, Any]) -> Iterator[Event]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        begun = {"index": number, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
        yield self._delta(index, {"tool_calls": [begun]})
        yield self._delta(index, {"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})

    def end_choice(self, choice: Choice) -> Iterator[Event]:
        yield self._chunk(self._entry(choice, delta={}))

    def end(self, completion: TurnCompletion) -> Iterator[Event]:
        if self.request.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(completion)}

    def failed(self, error: RequestError) -> Event:
        return error_fields(error)

    def encoded(self, content: Event) -> bytes:
        return event(content)

    def _head(self, kind: str) -> dict[str, Any]:
        id, created, model, session_id = self.head
        return {"id": f"chatcmpl-{id}", "object": kind, "created": created, "model": model, "session_id": session_id}

    def _prompt_ids(self, prompt_ids: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": prompt_ids} if self.request.return_token_ids else {}

    def _delta(self, index: int, delta: dict[str, Any]) -> Event:
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _chunk(self, entry: dict[str, Any]) -> Event:
        first, self._first = self._first, {}
        usage = {"usage": None} if self.request.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [entry], **usage, **first}

    def _entry(self, choice: Choice, **content: Any) -> dict[str, Any]:
        finish_reason = "length" if choice.is_cut else "tool_calls" if choice.message.get("tool_calls") else "stop"
        return {
            "index": choice.index,
            **content,
            "logprobs": _logprobs(choice, self.texts, self.request.top_logprobs) if self.request.logprobs else None,
            "finish_reason": finish_reason,
            "turn": choice.turn.index,
            **({"token_ids": choice.token_ids} if self.request.return_token_ids else {}),
        }


CHAT = Dialect("chat/completions", read_chat_request, ChatWriter)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI's, the content of a message with nothing but tool calls is null."""
    content = message["content"] or (None if message.get("tool_calls") else "")
    return {**message, "content": content, "refusal": None}


def _logprobs(choice: Choice, texts: TokenTexts | None, k: int) -> dict[str, Any]:
    """The log-probabilities of the tokens, with k alternatives for each."""
    assert texts is not None  # checked at the beginning
    alternatives: list[list[dict[str, Any]]] = [[] for _ in choice.token_ids]
    if k and choice.top_logprobs is not None:
        ids, values = (column[:, :k] for column in choice.top_logprobs)
        # As the second of two: a decoder may drop the space before the first token of a text.
        named = {token: texts([token, token])[1] for token in np.unique(ids).tolist()}
        alternatives = [
            [_logprob(*named[token], logprob) for token, logprob in zip(*row, strict=True)]
            for row in zip(ids.tolist(), values.tolist(), strict=True)
        ]
    entries = [
        {**_logprob(text, data, logprob), "top_logprobs": others}
        for (text, data), logprob, others in zip(
            texts(choice.token_ids), choice.logprobs.tolist(), alternatives, strict=True
        )
    ]
    return {"content": entries, "refusal": None}


def _logprob(text: str, data: bytes | None, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": None if data is None else list(data)}


def _usage(completion: TurnCompletion) -> dict[str, int]:
    prompt, sampled = len(completion.prompt_ids), completion.num_sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
