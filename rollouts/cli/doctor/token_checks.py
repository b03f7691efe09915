"""The server's token ids of a conversation, compared with the renderer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.cli.doctor.target import Finding, Target, failed, ok
from rollouts.engines.http.responses import response_error

# Text in which tokenizers and templates often differ: spaces, line breaks, digits, scripts, code, ends of turns.
_CONVERSATION = [
    {"role": "user", "content": "  Count: 1 22 333, 4,444.\n\n\tnaïve façade — 東京 🙂 don't\n"},
    {"role": "assistant", "content": "1, 2...\n\n```py\nx  =  [1,\t2]\n```"},
    {"role": "user", "content": "And?"},
]


async def text_tokens(target: Target) -> Finding:
    """Compare a conversation of text; the cure names the tokenizer, the form of contents or the template."""
    difference = await _difference(target, _CONVERSATION)
    return ok("all ids are equal") if difference is None else failed(difference, await _cure(target))


async def _cure(target: Target) -> str:
    text = _CONVERSATION[0]["content"]
    body = {"model": target.capabilities.model, "prompt": text, "add_special_tokens": False}
    response = await target.post("/tokenize", body, "tokenising text")
    ours = target.renderer.tokenizer.body.encode(text, add_special_tokens=False).ids
    if response.status == 200 and response.json().get("tokens") != ours:
        return f"the tokenizers differ: start `vllm serve` with --tokenizer {target.directory}"
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in _CONVERSATION]
    if await _difference(target, parts) is None:
        return (
            "only messages whose content is a string differ; servers convert strings to parts for templates that read "
            "parts: start `vllm serve` with --chat-template-content-format auto (the default)"
        )
    return (
        "the chat templates differ: start `vllm serve` with --chat-template and the file chat_template.jinja of "
        f"{target.directory}, and without --default-chat-template-kwargs"
    )


async def _difference(target: Target, messages: Sequence[Mapping[str, Any]]) -> str | None:
    ours = target.renderer.render_ids(messages, add_generation_prompt=True)
    body = {"model": target.capabilities.model, "messages": messages, "add_generation_prompt": True}
    response = await target.post("/tokenize", body, "tokenising a conversation")
    if response.status != 200:
        raise response_error("tokenising a conversation", response, "comparing tokens")
    tokenised = response.json()
    theirs = tokenised.get("tokens") if isinstance(tokenised, dict) else None
    return first_difference(target, ours, theirs or [])


def first_difference(target: Target, ours: Sequence[int], theirs: Sequence[int]) -> str | None:
    """The difference between two sequences of ids, from the first different id; None if they are equal."""
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    decode = target.renderer.tokenizer.decode
    our_text, their_text = (
        f"{list(ids)} {decode(ids)!r}" for ids in (ours[first : first + 4], theirs[first : first + 4])
    )
    return (
        f"{len(ours)} ids from the renderer, {len(theirs)} from the server; they differ from position {first}: "
        f"{our_text} in the renderer, {their_text} in the server"
    )
