"""The server's token ids of a conversation, compared with the renderer's."""

import asyncio
from collections.abc import Sequence
from typing import Any

from renderers.tokens.tokenizer import TemplateTokenizer
from rollouts.cli.doctor.target import Finding, Target
from rollouts.engines.http.responses import response_error
from rollouts.engines.vllm.probe_requests import json_object

# Text in which tokenizers and templates often differ: spaces, line breaks, digits, scripts, code, ends of
# turns.
_CONVERSATION = [
    {"role": "user", "content": "  Count: 1 22 333, 4,444.\n\n\tnaïve façade — 東京 🙂 don't\n"},
    {"role": "assistant", "content": "1, 2...\n\n```py\nx  =  [1,\t2]\n```"},
    {"role": "user", "content": "And?"},
]


async def tokenizer(target: Target) -> Finding:
    """Compare the ids of a text that holds all tokens, the control tokens first."""
    text, ours = await asyncio.to_thread(_text_of_all_tokens, target.renderer.tokenizer)
    difference = first_difference(target, ours, await _server_ids(target, prompt=text, add_special_tokens=False))
    if difference is None:
        size = target.renderer.tokenizer.vocab_size
        return Finding("ok", f"the ids of a text with {len(set(ours))} of {size} tokens are equal")
    option = "--tokenizer" if target.kind == "vllm" else "--tokenizer-path"
    return Finding(
        "failed",
        difference,
        f"the tokenizers differ: start `{target.kind} serve` with {option} {target.directory}, or pass "
        "--model the directory that is served",
    )


def _text_of_all_tokens(tokenizer: TemplateTokenizer) -> tuple[str, list[int]]:
    """The text, and its ids. A token of a part of a character, or one that no text gives, is left out."""
    ids = sorted(tokenizer.vocabulary().values())
    control = "".join(tokenizer.control_token(token) or "" for token in ids)
    others = [[token] for token in ids if tokenizer.control_token(token) is None]
    decoded = tokenizer.body.decode_batch(others, skip_special_tokens=False)
    texts = [text for text in decoded if text and "\ufffd" not in text]
    # Words after a space are tokens of their own.
    text = "\n".join([control, *texts, " ".join(texts)])
    return text, tokenizer.encode_scaffold(text)


async def text_tokens(target: Target) -> Finding:
    """Compare a conversation of text; the cure names the form of contents or the template."""
    ours = target.renderer.render_ids(_CONVERSATION, add_generation_prompt=True)
    theirs = await _server_ids(target, messages=_CONVERSATION, add_generation_prompt=True)
    difference = first_difference(target, ours, theirs)
    if difference is None:
        return Finding("ok", "all ids are equal")
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in _CONVERSATION]
    if await _server_ids(target, messages=parts, add_generation_prompt=True) == ours:
        cure = (
            "only messages whose content is a string differ; servers convert strings to parts for templates "
            "that read parts: start `vllm serve` with --chat-template-content-format auto (the default)"
        )
    else:
        cure = (
            "the chat templates differ: start `vllm serve` with --chat-template and the file "
            f"chat_template.jinja of {target.directory}, and without --default-chat-template-kwargs"
        )
    return Finding("failed", difference, cure)


async def _server_ids(target: Target, **body: Any) -> list[int]:
    response = await target.post("/tokenize", body, "comparing tokens")
    if response.status != 200:
        raise response_error("comparing tokens", response, "/tokenize")
    ids = json_object(response).get("tokens")
    return ids if isinstance(ids, list) and all(type(token) is int for token in ids) else []


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
        f"{len(ours)} ids from the renderer, {len(theirs)} from the server; they differ from position "
        f"{first}: {our_text} in the renderer, {their_text} in the server"
    )
