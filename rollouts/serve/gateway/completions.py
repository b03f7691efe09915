"""Completions of a session: the prompt that continues it, the sampled turns, and the message of each."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from renderers.errors import MediaError, MessageError
from renderers.parsing.format import Format
from renderers.tokens.decoding import TokenDecoder
from renderers.tokens.tokenizer import TemplateTokenizer
from rollouts.engines.protocol import TokenListener
from rollouts.engines.stop_strings import Decode, cut_at_stop, ending_early, text_before
from rollouts.episodes.engine_calls import check_uninterrupted, generated
from rollouts.episodes.turns import Prompt, SampledTurn, derived_seed
from rollouts.serve.errors import RequestError, invalid_message
from rollouts.serve.gateway.dialect import Choice, TokenTexts, TurnCompletion, TurnRequest
from rollouts.serve.gateway.request_checks import check_arguments, check_is_printed
from rollouts.serve.gateway.session import RecordedTurn, Session
from rollouts.serve.gateway.session_store import SessionStore

#: Makes a listener for the tokens of a prompt.
ListenerFactory = Callable[[Prompt], TokenListener]


async def complete_turn(
    session: Session,
    request: TurnRequest,
    store: SessionStore,
    adapter: str | None,
    request_seconds: float,
    make_listener: ListenerFactory | None = None,
) -> TurnCompletion:
    """Sample the completions of a request and record them as turns of the session.

    `adapter` names the LoRA adapter of the engine to sample with. `make_listener` is called with the prompt;
    an engine that streams reports tokens to what it returns. A cancelled call aborts the request of the
    engine, and records nothing. Raises `RequestError`, and what renderer and engine raise.
    """
    recorder, sampling, stop = session.recorder, request.sampling, request.stop
    decode = decoder(recorder.renderer.renderer) if stop else str
    if sampling.stop_token_ids:
        sampling = replace(
            sampling, stop_token_ids=tuple(dict.fromkeys((*recorder.stop_token_ids, *sampling.stop_token_ids)))
        )
    with store.request(session):
        session.num_requests += 1
        seed = sampling.seed
        if session.seed is not None and getattr(request.body, "seed", None) is None:
            seed = derived_seed(session.seed, session.num_requests)
        request_id = f"{session.id}-{session.num_requests}-{uuid.uuid4().hex[:8]}"
        try:
            async with asyncio.timeout(request_seconds):
                prompt, parent = await prompt_of(session, request)
                generate = replace(recorder.request(prompt, sampling, seed, request_id), adapter=adapter)
                began = time.perf_counter()
                listen = None if make_listener is None else make_listener(prompt)
                async with ending_early(recorder.engine.abort, generate, stop, decode, listen) as listener:
                    sampled = await generated(recorder.engine, generate, recorder.vocab_size, listener)
        except TimeoutError:
            reason = f"no completion within {request_seconds:g} s; nothing of it is recorded. Send a smaller max_tokens"
            raise RequestError(504, reason, code="timeout") from None
        seconds = time.perf_counter() - began
        completions = [cut_at_stop(completion, stop, decode) for completion in sampled]
        check_uninterrupted(generate.request_id, [completion for completion, _ in completions])
        choices = []
        for index, (completion, ended) in enumerate(completions):
            turn = await recorder.record(prompt, completion, agent="", engine_seconds=seconds)
            message = _client_message(turn, calls_tools=request.body.calls_tools)
            variants: Sequence[dict[str, Any]] = ()
            if ended is not None:
                # Some agents write the stop string back, which was sampled.
                variants = (message, {**message, "content": text_before(message["content"], ended) + ended})
                message = _without_stop(message, ended)
            recorded, digests = session.add(turn, request.history, parent, index, message, variants)
            store.recorded(session, digests, [call["id"] for call in message.get("tool_calls") or ()])
            choices.append(Choice(index, recorded, message, completion, ended, sampling.max_tokens))
            if choices[-1].is_at_context:
                session.increment("completions_ended_by_context")
        return TurnCompletion(prompt.rendered.token_ids, choices)


async def prompt_of(session: Session, request: TurnRequest) -> tuple[Prompt, RecordedTurn | None]:
    """The prompt of a request, and the turn that it continues; None where the conversation is rendered in full."""
    history = request.history
    turn = session.find(history)
    if turn is not None and any(message["role"] == "assistant" for message in history.messages[turn.num_messages :]):
        turn = None  # a message that the model did not write follows it
    start = 0 if turn is None else turn.num_messages
    messages = session.model_messages(history, turn)
    try:
        if turn is None:
            format = getattr(session.recorder.renderer.renderer, "format", None)
            if isinstance(format, Format) and format.arguments == "object":  # other renderers read what clients send
                check_arguments(request)
            prompt = await session.recorder.first_prompt(messages, request.tools, "messages")
        else:
            prompt = await session.recorder.next_prompt(await session.sampled_turn(turn), messages, "messages")
    except (MediaError, MessageError) as error:
        if error.message_index is None:
            raise invalid_message(str(error), "messages") from error
        place = request.place(start + error.message_index)
        where = place.message if error.part_index is None else place.field(f"content[{error.part_index}]")
        raise invalid_message(f"{where}: {error.reason}", where) from error
    first = len(prompt.conversation) - len(prompt.messages)  # 0 for a conversation that was rendered in full
    check_is_printed(request, prompt.messages, prompt.rendered.unprinted, first)
    return prompt, turn


def decoder(renderer: Any) -> Decode:
    """What makes text of token ids. Raises `RequestError` for a renderer without a tokenizer."""
    decode: Decode | None = getattr(getattr(renderer, "tokenizer", None), "decode", None)
    if decode is None:
        raise RequestError(400, "this renderer has no tokenizer, which stop strings and logprobs need")
    return decode


def token_texts_of(tokenizer: Any) -> TokenTexts | None:
    """What tells the texts of tokens; None without a tokenizer that decodes.

    The bytes of the tokens, joined, are their text in UTF-8, also where a character has several tokens.
    """
    if isinstance(tokenizer, TemplateTokenizer):
        decoder = TokenDecoder(tokenizer)
        return lambda ids: [(data.decode(errors="replace"), data) for data in decoder.bytes_of(ids)]
    decode: Callable[[Sequence[int]], str] | None = getattr(tokenizer, "decode", None)
    if decode is None:
        return None
    return lambda ids: [(text, None if "\ufffd" in text else text.encode()) for text in (decode([i]) for i in ids)]


def _client_message(turn: SampledTurn, *, calls_tools: bool) -> dict[str, Any]:
    """The completion as a message with ids of calls that are unique; text alone unless `calls_tools`."""
    own: Any = turn.message
    if not calls_tools:
        text = turn.parsed.content + "".join(call.raw for call in turn.parsed.tool_calls)
        own = {"role": "assistant", "content": text, "reasoning_content": turn.parsed.reasoning_content}
    message: dict[str, Any] = {"role": "assistant", "content": own["content"] or ""}
    if own.get("reasoning_content") is not None:
        message["reasoning_content"] = own["reasoning_content"]
    for call in own.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": call["function"]["name"], "arguments": text}
        named = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(named)
    return message


def _without_stop(message: dict[str, Any], stop: str) -> dict[str, Any]:
    """The message up to the stop string, which is in its content, or in its reasoning or last call and ends it."""
    reasoning, content = message.get("reasoning_content") or "", message["content"]
    if stop in reasoning or (reasoning and not content):
        return {**message, "reasoning_content": text_before(reasoning, stop)}
    if stop not in content and message.get("tool_calls"):
        return message
    return {**message, "content": text_before(content, stop)}
