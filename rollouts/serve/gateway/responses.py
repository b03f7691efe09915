"""Chat completions as JSON objects and as server-sent events, with vLLM's names for token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from renderers.tokens.decoding import TokenDecoder
from renderers.tokens.tokenizer import TemplateTokenizer
from rollouts.serve.gateway.chat_request import ChatRequest
from rollouts.serve.gateway.completions import ChatCompletion, Choice

#: The text and the bytes of each token; the bytes are None where only a text is known, which is not whole characters.
TokenTexts = Callable[[Sequence[int]], list[tuple[str, bytes | None]]]


def token_texts_of(tokenizer: Any) -> TokenTexts | None:
    """What tells the texts of tokens; None without a tokenizer that decodes.

    The bytes of the tokens of a completion, joined, are its text in UTF-8, also where a character has several tokens.
    """
    if isinstance(tokenizer, TemplateTokenizer):
        decoder = TokenDecoder(tokenizer)
        return lambda ids: [(data.decode(errors="replace"), data) for data in decoder.bytes_of(ids)]
    decode: Callable[[Sequence[int]], str] | None = getattr(tokenizer, "decode", None)
    if decode is None:
        return None
    return lambda ids: [(text, None if "\ufffd" in text else text.encode()) for text in (decode([i]) for i in ids)]


def completion_object(completion: ChatCompletion, chat: ChatRequest, texts: TokenTexts | None) -> dict[str, Any]:
    """The `chat.completion` object. Each choice has the index of its `turn`, the object its `session_id`."""
    choices = []
    for choice in completion.choices:
        entry: dict[str, Any] = {
            "index": choice.index,
            "message": _message(choice.message),
            "logprobs": _logprobs(choice, texts) if chat.logprobs and texts else None,
            "finish_reason": choice.finish_reason,
            "turn": choice.turn,
        }
        if chat.return_token_ids:
            entry["token_ids"] = choice.token_ids
        choices.append(entry)
    return {
        **_head(completion, "chat.completion"),
        "choices": choices,
        "usage": _usage(completion),
        **({"prompt_token_ids": completion.prompt_ids} if chat.return_token_ids else {}),
    }


@dataclass(slots=True)
class SentText:
    """What a client has of a choice whose completion is not finished: the text of its reasoning and its content."""

    reasoning: str = ""
    content: str = ""


def text_event(completion: ChatCompletion, chat: ChatRequest, index: int, delta: dict[str, Any]) -> str:
    """The event of text of choice `index` of a completion that is not finished."""
    usage = {"usage": None} if chat.include_usage else {}
    entry = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    return _event({**_head(completion, "chat.completion.chunk"), "choices": [entry], **usage})


def completion_events(
    completion: ChatCompletion,
    chat: ChatRequest,
    texts: TokenTexts | None,
    sent: Mapping[int, SentText] = MappingProxyType({}),
) -> Iterator[str]:
    """The `chat.completion.chunk` objects as server-sent events, without the text that was `sent`, by choice.

    Each part of a message is one chunk: role, reasoning, content, and the name and the arguments of each tool call.
    Log-probabilities and token ids are in the last chunk of their choice.
    """
    head = _head(completion, "chat.completion.chunk")
    usage = {"usage": None} if chat.include_usage else {}
    first = {"prompt_token_ids": completion.prompt_ids} if chat.return_token_ids else {}
    for choice in completion.choices:
        for delta in _deltas(choice.message, sent.get(choice.index)):
            entry = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield _event({**head, "choices": [entry], **usage, **first})
            first = {}
        last = {
            "index": choice.index,
            "delta": {},
            "logprobs": _logprobs(choice, texts) if chat.logprobs and texts else None,
            "finish_reason": choice.finish_reason,
            "turn": choice.turn,
            **({"token_ids": choice.token_ids} if chat.return_token_ids else {}),
        }
        yield _event({**head, "choices": [last], **usage, **first})
        first = {}
    if chat.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(completion)})
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


def _head(completion: ChatCompletion, kind: str) -> dict[str, Any]:
    return {
        "id": completion.id,
        "object": kind,
        "created": completion.created,
        "model": completion.model,
        "session_id": completion.session_id,
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI's, the content of a message with nothing but tool calls is null."""
    content = message["content"] or (None if message.get("tool_calls") else "")
    return {**message, "content": content, "refusal": None}


def _deltas(message: dict[str, Any], sent: SentText | None) -> Iterator[dict[str, Any]]:
    if sent is None:
        yield {"role": "assistant", "content": ""}
        sent = SentText()
    if reasoning := (message.get("reasoning_content") or "")[len(sent.reasoning) :]:
        yield {"reasoning_content": reasoning}
    if content := message["content"][len(sent.content) :]:
        yield {"content": content}
    for index, call in enumerate(message.get("tool_calls") or ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        begun = {"index": index, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
        yield {"tool_calls": [begun]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def _logprobs(choice: Choice, texts: TokenTexts) -> dict[str, Any]:
    entries = [
        {"token": text, "logprob": logprob, "bytes": None if data is None else list(data), "top_logprobs": []}
        for (text, data), logprob in zip(texts(choice.token_ids), choice.logprobs.tolist(), strict=True)
    ]
    return {"content": entries, "refusal": None}


def _usage(completion: ChatCompletion) -> dict[str, int]:
    prompt = len(completion.prompt_ids)
    sampled = int(np.sum([len(choice.token_ids) for choice in completion.choices]))
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
