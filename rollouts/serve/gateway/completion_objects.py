"""What the client receives of a completion: OpenAI's `chat.completion` object, or its chunks as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from renderers.tokens.decoding import TokenDecoder
from renderers.tokens.tokenizer import TemplateTokenizer
from rollouts.serve.bodies import END_OF_STREAM, event
from rollouts.serve.gateway.chat_request import ChatRequest
from rollouts.serve.gateway.completions import ChatCompletion, Choice

#: The text and the bytes of each token; the bytes are None where only a text is known, which is not whole
#: characters.
TokenTexts = Callable[[Sequence[int]], list[tuple[str, bytes | None]]]


def token_texts_of(tokenizer: Any) -> TokenTexts | None:
    """What tells the texts of tokens; None without a tokenizer that decodes.

    The bytes of the tokens of a completion, joined, are its text in UTF-8, also where a character has several
    tokens.
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
    return {
        **_head(completion, "chat.completion"),
        "choices": [_entry_of(choice, chat, texts, message=_message(choice.message)) for choice in completion.choices],
        "usage": _usage(completion),
        **({"prompt_token_ids": completion.prompt_ids} if chat.return_token_ids else {}),
    }


def _entry_of(choice: Choice, chat: ChatRequest, texts: TokenTexts | None, **content: Any) -> dict[str, Any]:
    return {
        "index": choice.index,
        **content,
        "logprobs": _logprobs(choice, texts, chat.top_logprobs) if chat.logprobs and texts else None,
        "finish_reason": choice.finish_reason,
        "turn": choice.turn,
        **({"token_ids": choice.token_ids} if chat.return_token_ids else {}),
    }


@dataclass(slots=True)
class SentText:
    """What a client has of a choice whose completion is not finished: the text of its reasoning and its content."""

    reasoning: str = ""
    content: str = ""


def delta_event(
    completion: ChatCompletion, chat: ChatRequest, index: int, delta: dict[str, Any], **fields: Any
) -> bytes:
    """The event of a part of choice `index`, which is not finished; `fields` are of the whole event."""
    entry = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    return _chunk_event(completion, chat, entry, **fields)


def _chunk_event(completion: ChatCompletion, chat: ChatRequest, entry: dict[str, Any], **fields: Any) -> bytes:
    usage = {"usage": None} if chat.include_usage else {}
    return event({**_head(completion, "chat.completion.chunk"), "choices": [entry], **usage, **fields})


def completion_events(
    completion: ChatCompletion,
    chat: ChatRequest,
    texts: TokenTexts | None,
    sent: Mapping[int, SentText] = MappingProxyType({}),
) -> Iterator[bytes]:
    """The `chat.completion.chunk` objects as server-sent events, without the text that was `sent`, by choice.

    Each part of a message is one chunk: role, reasoning, content, and the name and the arguments of each tool
    call. Log-probabilities and token ids are in the last chunk of their choice.
    """
    first = {"prompt_token_ids": completion.prompt_ids} if chat.return_token_ids else {}
    for choice in completion.choices:
        for delta in _deltas(choice.message, sent.get(choice.index)):
            yield delta_event(completion, chat, choice.index, delta, **first)
            first = {}
        yield _chunk_event(completion, chat, _entry_of(choice, chat, texts, delta={}), **first)
        first = {}
    if chat.include_usage:
        yield event({**_head(completion, "chat.completion.chunk"), "choices": [], "usage": _usage(completion)})
    yield END_OF_STREAM


def _head(completion: ChatCompletion, kind: str) -> dict[str, Any]:
    return {
        "id": completion.id,
        "object": kind,
        "created": completion.created,
        "model": completion.model,
        "session_id": completion.session_id,
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """The message in OpenAI's form: the content beside nothing but tool calls is null."""
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


def _logprobs(choice: Choice, texts: TokenTexts, k: int) -> dict[str, Any]:
    """The log-probabilities of the tokens, with k alternatives for each."""
    alternatives: list[list[dict[str, Any]]] = [[] for _ in choice.token_ids]
    if k and choice.top_logprobs is not None:
        ids, values = (column[:, :k] for column in choice.top_logprobs)
        # As the second of two: a decoder may drop the space before the first token of a text.
        named = {token: texts([token, token])[1] for token in np.unique(ids).tolist()}
        alternatives = [
            [_entry(*named[token], logprob) for token, logprob in zip(*row, strict=True)]
            for row in zip(ids.tolist(), values.tolist(), strict=True)
        ]
    entries = [
        {**_entry(text, data, logprob), "top_logprobs": others}
        for (text, data), logprob, others in zip(
            texts(choice.token_ids), choice.logprobs.tolist(), alternatives, strict=True
        )
    ]
    return {"content": entries, "refusal": None}


def _entry(text: str, data: bytes | None, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": None if data is None else list(data)}


def _usage(completion: ChatCompletion) -> dict[str, int]:
    prompt = len(completion.prompt_ids)
    sampled = int(np.sum([len(choice.token_ids) for choice in completion.choices]))
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
