"""Whether the server's token ids of a conversation are the renderer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from renderers.errors import TemplateError
from rollouts.cli.doctor.finding import Finding, failed, ok
from rollouts.cli.doctor.target import Patient
from rollouts.engines.vllm.http.response import response_error

# What tokenizers and templates disagree about first: spaces, line breaks, digits, scripts, reasoning, turn ends.
_CONVERSATION = [
    {"role": "user", "content": "  Count: 1 22 333, 4,444.\n\n\tnaïve façade — 東京 🙂 don't\n"},
    {"role": "assistant", "content": "1, 2...\n\n```py\nx  =  [1,\t2]\n```"},
    {"role": "user", "content": "And?"},
]
_SYSTEM = {"role": "system", "content": "Be brief."}


async def text_tokens(patient: Patient) -> Finding:
    """A conversation of text, and where it differs, whether tokenizer, form of contents or template does."""
    messages = _accepted(patient)
    difference = await _difference(patient, messages)
    if difference is None:
        count = len(patient.renderer.render_ids(messages, add_generation_prompt=True))
        return ok("text tokens", f"{count} ids, all equal")
    return failed("text tokens", difference, await _cure(patient, messages))


async def _cure(patient: Patient, messages: Sequence[Mapping[str, Any]]) -> str:
    text = str(messages[-3]["content"])
    body = {"model": patient.capabilities.model, "prompt": text, "add_special_tokens": False}
    reply = await patient.post("/tokenize", body, "tokenising a text")
    ours = patient.renderer.tokenizer.body.encode(text, add_special_tokens=False).ids
    if reply.status == 200 and reply.json().get("tokens") != ours:
        return f"the tokenizers differ: start `vllm serve` with --tokenizer {patient.directory}"
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    if await _difference(patient, parts) is None:
        return (
            "only contents that are strings differ, which servers turn into parts where the template reads parts: "
            "start `vllm serve` with --chat-template-content-format auto (the default)"
        )
    template = patient.directory / "chat_template.jinja"
    where = template if template.exists() else "TEMPLATE_OF_MODEL.jinja"
    return f"the chat templates differ: start `vllm serve` with --chat-template {where}"


async def _difference(patient: Patient, messages: Sequence[Mapping[str, Any]]) -> str | None:
    ours = patient.renderer.render_ids(messages, add_generation_prompt=True)
    body = {"model": patient.capabilities.model, "messages": messages, "add_generation_prompt": True}
    reply = await patient.post("/tokenize", body, "tokenising a conversation")
    if reply.status != 200:
        raise response_error("tokenising a conversation", reply, "comparing tokens")
    answer = reply.json()
    theirs = answer.get("tokens") if isinstance(answer, dict) else None
    return await first_difference(patient, ours, theirs or [])


def _accepted(patient: Patient) -> list[dict[str, Any]]:
    """The conversation, with a system message where the template takes one."""
    try:
        patient.renderer.render([_SYSTEM, *_CONVERSATION], add_generation_prompt=True)
    except TemplateError:
        return list(_CONVERSATION)
    return [_SYSTEM, *_CONVERSATION]


async def first_difference(patient: Patient, ours: Sequence[int], theirs: Sequence[int]) -> str | None:
    """How two sequences of ids differ, from the first id on that does; None where they are equal."""
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    shown = [await _with_text(patient, ids[at : at + 4]) for ids in (ours, theirs)]
    return f"{len(ours)} ids of ours, {len(theirs)} of the server's; from {at} on {shown[0]} against {shown[1]}"


async def _with_text(patient: Patient, ids: Sequence[int]) -> str:
    if not ids:
        return "nothing"
    body = {"model": patient.capabilities.model, "tokens": list(ids)}
    reply = await patient.post("/detokenize", body, "asking for the text of tokens")
    text = reply.json().get("prompt") if reply.status == 200 else None
    return f"{list(ids)} {text!r}"
