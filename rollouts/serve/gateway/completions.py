"""Samples a completion of a session, records it, and answers with it, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from renderers import ParsedResponse
from renderers.errors import MediaError, MessageError
from renderers.parsing.format import Format
from renderers.parsing.response import ContentDelta, ReasoningDelta
from renderers.tokens.decoding import TokenDecoder
from renderers.tokens.tokenizer import TemplateTokenizer
from rollouts.engines.protocol import (
    Completion,
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenListener,
    TopLogprobs,
    is_abortable,
)
from rollouts.engines.stop_strings import Decode, EarlyStop, cut_at_stop, sendable_length, text_before
from rollouts.episodes.turns import Prompt, SampledTurn, check_uninterrupted, generate_completions, generated
from rollouts.serve.bodies import END_OF_STREAM, event
from rollouts.serve.errors import (
    ANSWERED,
    RequestError,
    error_fields,
    invalid_message,
    request_error,
    unsupported_field,
)
from rollouts.serve.gateway.chat_messages import as_the_model_writes, check_is_printed
from rollouts.serve.gateway.chat_request import ChatRequest
from rollouts.serve.gateway.session import Match, Session
from rollouts.serve.gateway.session_store import SessionStore

# Chat completions of a session: the prompt that continues it, the sampled turns, and what the client receives.


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion as the client receives it. `turn` is the index of its turn in the trajectory."""

    index: int
    turn: int
    message: dict[str, Any]
    finish_reason: str
    token_ids: list[int]
    logprobs: np.ndarray
    top_logprobs: TopLogprobs | None


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """The completions of one request. `id` is random, `created` in seconds since the epoch."""

    id: str
    created: int
    model: str
    session_id: str
    prompt_ids: list[int]
    choices: list[Choice]


#: Makes a listener for the tokens of a prompt.
ListenerFactory = Callable[[Prompt], TokenListener]


async def complete_chat(
    session: Session,
    chat: ChatRequest,
    store: SessionStore,
    *,
    model: str,
    adapter: str | None,
    request_seconds: float,
    make_listener: ListenerFactory | None = None,
) -> ChatCompletion:
    """Sample the completions of a request and record them as turns of the session.

    `adapter` names the LoRA adapter of the engine to sample with. `make_listener` is called with the prompt; an engine
    that streams reports tokens to what it returns. A cancelled call aborts the request of the engine, and records
    nothing. Raises `RequestError`, and what renderer and engine raise.
    """
    recorder = session.recorder
    prompt, match = await _prompt(session, chat)
    sampling = chat.sampling
    if sampling.stop_token_ids:
        sampling = replace(
            sampling, stop_token_ids=tuple(dict.fromkeys((*recorder.stop_token_ids, *sampling.stop_token_ids)))
        )
    request = recorder.request(
        prompt, sampling, sampling.seed, f"{session.id}-{session.num_requests}-{uuid.uuid4().hex[:8]}"
    )
    request = replace(request, adapter=adapter)
    began = time.perf_counter()
    try:
        async with asyncio.timeout(request_seconds):
            listen = None if make_listener is None else make_listener(prompt)
            completions = await _sampled(session, chat, request, listen)
    except TimeoutError:
        message = f"no completion within request_seconds={request_seconds:g}; nothing of it is recorded"
        raise RequestError(504, message, code="timeout") from None
    seconds = time.perf_counter() - began
    choices = []
    for index, (completion, stop) in enumerate(completions):
        choices.append(await _record(session, chat, store, prompt, match, completion, stop, index, seconds))
    return ChatCompletion(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        session_id=session.id,
        prompt_ids=prompt.rendered.token_ids,
        choices=choices,
    )


async def _sampled(
    session: Session, chat: ChatRequest, request: GenerateRequest, listen: TokenListener | None
) -> list[tuple[Completion, str | None]]:
    """The completions of a request, each with the stop string that ends it."""
    recorder = session.recorder
    if not chat.stop:
        completions = await generate_completions(recorder.engine, request, recorder.vocab_size, listen)
        return [(completion, None) for completion in completions]
    decode = decoder(recorder.renderer.renderer)
    engine = recorder.engine
    early_stop = EarlyStop(engine.abort if is_abortable(engine) else None, request, chat.stop, decode, listen)
    completions = await generated(engine, request, recorder.vocab_size, early_stop)
    await early_stop.close()
    cut = [cut_at_stop(completion, chat.stop, decode) for completion in completions]
    check_uninterrupted(request, [completion for completion, _ in cut])
    return cut


async def _prompt(session: Session, chat: ChatRequest) -> tuple[Prompt, Match | None]:
    """The prompt of a request, and the turn that it continues; None where the conversation is rendered in full."""
    history = chat.history
    match = session.find(history)
    if match is not None and any(message["role"] == "assistant" for message in history.messages[match.num_messages :]):
        match = None  # a message that the model did not write follows the turn
    start = 0 if match is None else match.num_messages
    messages = session.model_messages(history, match, start)
    try:
        if match is None:
            format = getattr(session.recorder.renderer.renderer, "format", None)
            if isinstance(format, Format):  # other renderers read what clients send
                messages = as_the_model_writes(messages, format)
            prompt = await session.recorder.first_prompt(messages, chat.tools, "messages")
        else:
            prompt = await session.recorder.next_prompt(await session.sampled_turn(match.turn), messages, "messages")
    except (MediaError, MessageError) as error:
        raise _placed(error, start) from error
    first = len(prompt.conversation) - len(prompt.messages)  # 0 for a conversation that was rendered in full
    check_is_printed(prompt.messages, prompt.rendered.unprinted, first)
    return prompt, match


def _placed(error: MediaError | MessageError, start: int) -> RequestError:
    """The error of a message of the request. `error` counts messages from message `start`."""
    if error.message_index is None:
        return invalid_message(str(error), "messages")
    place = f"messages[{start + error.message_index}]"
    if error.part_index is not None:
        place += f".content[{error.part_index}]"
    return invalid_message(f"{place}: {error.reason}", place)


async def _record(
    session: Session,
    chat: ChatRequest,
    store: SessionStore,
    prompt: Prompt,
    match: Match | None,
    completion: Completion,
    stop: str | None,
    index: int,
    seconds: float,
) -> Choice:
    """Add a completion to the trajectory, and make the message that the client receives."""
    turn = await session.recorder.record(prompt, completion, agent="", engine_seconds=seconds)
    message = _client_message(turn, calls_tools=chat.calls_tools)
    variants: Sequence[dict[str, Any]] = ()
    if stop is not None:
        # Some agents write the stop string back, which was sampled.
        variants = (message, {**message, "content": text_before(message["content"], stop) + stop})
        message = _without_stop(message, stop)
    digests = session.add(turn, chat.history, match, choice=index, message=message, variants=variants)
    call_ids = [call["id"] for call in message.get("tool_calls") or ()]
    store.recorded(session, digests, call_ids)
    return Choice(
        index=index,
        turn=turn.index,
        message=message,
        finish_reason=_finish_reason(completion, message),
        token_ids=list(turn.completion_ids),
        logprobs=completion.logprobs,
        top_logprobs=completion.top_logprobs,
    )


def decoder(renderer: Any) -> Decode:
    """What makes text of token ids. Raises `RequestError` for a renderer without a tokenizer."""
    decode: Decode | None = getattr(getattr(renderer, "tokenizer", None), "decode", None)
    if decode is None:
        raise unsupported_field("this renderer has no tokenizer, so that stop strings cannot be found", "stop")
    return decode


def _client_message(turn: SampledTurn, *, calls_tools: bool) -> dict[str, Any]:
    """The parsed completion in OpenAI's form. Ids of tool calls are unique, whatever the model wrote."""
    if not calls_tools:
        return _as_text(turn.parsed)
    message: dict[str, Any] = {"role": "assistant", "content": turn.message["content"] or ""}
    if turn.message.get("reasoning_content") is not None:
        message["reasoning_content"] = turn.message["reasoning_content"]
    if turn.message.get("tool_calls"):
        message["tool_calls"] = [_client_call(call) for call in turn.message["tool_calls"]]
    return message


def _as_text(parsed: ParsedResponse) -> dict[str, Any]:
    """A completion with its tool calls as text, for a request that allows none."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": parsed.content + "".join(call.raw for call in parsed.tool_calls),
    }
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = parsed.reasoning_content
    return message


def _client_call(call: Any) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": call["function"]["name"], "arguments": text}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _without_stop(message: dict[str, Any], stop: str) -> dict[str, Any]:
    """The message up to the stop string, which is in its content, or in its reasoning or last call and ends it."""
    reasoning, content = message.get("reasoning_content") or "", message["content"]
    if stop in reasoning or (reasoning and not content):
        return {**message, "reasoning_content": text_before(reasoning, stop)}
    if stop not in content and message.get("tool_calls"):
        return message
    return {**message, "content": text_before(content, stop)}


def _finish_reason(completion: Completion, message: dict[str, Any]) -> str:
    if completion.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if message.get("tool_calls") else "stop"


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
            "logprobs": _logprobs(choice, texts, chat.top_logprobs) if chat.logprobs and texts else None,
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


def _delta_event(
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

    Each part of a message is one chunk: role, reasoning, content, and the name and the arguments of each tool call.
    Log-probabilities and token ids are in the last chunk of their choice.
    """
    first = {"prompt_token_ids": completion.prompt_ids} if chat.return_token_ids else {}
    for choice in completion.choices:
        for delta in _deltas(choice.message, sent.get(choice.index)):
            yield _delta_event(completion, chat, choice.index, delta, **first)
            first = {}
        last = {
            "index": choice.index,
            "delta": {},
            "logprobs": _logprobs(choice, texts, chat.top_logprobs) if chat.logprobs and texts else None,
            "finish_reason": choice.finish_reason,
            "turn": choice.turn,
            **({"token_ids": choice.token_ids} if chat.return_token_ids else {}),
        }
        yield _chunk_event(completion, chat, last, **first)
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
            self._events.put_nowait(_delta_event(self._head, self._chat, index, role))
        if isinstance(piece, ReasoningDelta):
            sent.reasoning += piece.text
            delta = {"reasoning_content": piece.text}
        else:
            sent.content += piece.text
            delta = {"content": piece.text}
        self._events.put_nowait(_delta_event(self._head, self._chat, index, delta))
