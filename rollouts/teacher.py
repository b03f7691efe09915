"""Whether a teacher reads tokens as the student does: what it says about others has no meaning."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from renderers import TemplateRenderer
from renderers.errors import RendererError
from rollouts.errors import ArgumentError

#: A conversation that most templates take, of each kind of turn.
_TURNS: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "Which of the two?\n"},
    {"role": "assistant", "content": "The first, 10:15."},
    {"role": "user", "content": "Why? <b>Ünïcode</b>"},
]
_CALL: Final = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"at": "the door"}}}
_ANSWERED: Final[list[dict[str, Any]]] = [
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_0", "name": "look", "content": "A red door."},
]
_PARAMETERS: Final = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
_TOOLS: Final = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": _PARAMETERS}}]
_IMAGE: Final = {"type": "image", "image": np.zeros((32, 32, 3), np.uint8)}

#: What templates are compared by, each of which one may have: messages and tools.
_PROBES: Final[Mapping[str, tuple[list[Any], list[Any] | None]]] = {
    "": (_TURNS, None),
    " with a system message": ([{"role": "system", "content": "Be brief."}, *_TURNS], None),
    " with tools": ([*_TURNS, *_ANSWERED], _TOOLS),
    " with an image": ([{"role": "user", "content": [_IMAGE, {"type": "text", "text": "Which?"}]}], None),
}

_SAME_TEMPLATE: Final = (
    "Take a teacher of the same template, or load its renderer with chat_template= if it was trained on this one"
)


def check_teacher(renderer: TemplateRenderer, teacher: TemplateRenderer) -> None:
    """Raise `ArgumentError`, which says why, unless a teacher reads the tokens of `renderer` as its own would be read.

    Compared are the tokens of all ids of `renderer` (the teacher may have more); the prompts of a conversation
    alone, with a system message and with tools, as far as the template of `renderer` takes them, and of one with an
    image, where both take images; and the processors of media, by their fingerprints.
    """
    if (difference := _difference(renderer, teacher)) is not None:
        raise ArgumentError("teacher", teacher, difference)


def _difference(renderer: TemplateRenderer, teacher: TemplateRenderer) -> str | None:
    own, other = renderer.tokenizer.vocabulary(), teacher.tokenizer.vocabulary()
    if differing := [(token_id, token) for token, token_id in own.items() if other.get(token) != token_id]:
        first_id, first = min(differing)
        return (
            f"its tokenizer of {len(other)} tokens gives {first!r} the id {other.get(first)}, and that of the student, "
            f"of {len(own)} tokens, {first_id}: take a teacher with the student's vocabulary"
        )
    for what, (messages, tools) in _PROBES.items():
        if what == " with an image" and not ("image" in renderer.processors and "image" in teacher.processors):
            continue
        # What the items are made into is compared below.
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, "process_multimodal": False}
        try:
            ids = renderer.render_ids(messages, **options)
        except RendererError:
            continue  # no episode has such a prompt
        try:
            of_teacher = teacher.render_ids(messages, **options)
        except RendererError as error:
            return f"its chat template refuses a prompt{what} that the student's takes: {error}. {_SAME_TEMPLATE}"
        if ids != of_teacher:
            pairs = enumerate(zip(ids, of_teacher, strict=False))
            # Where one is the beginning of the other, they differ behind it.
            place = next((place for place, (one, two) in pairs if one != two), min(len(ids), len(of_teacher)))
            printed, expected = (
                each.tokenizer.decode(row[place : place + 8]) for each, row in ((renderer, ids), (teacher, of_teacher))
            )
            rule = f"its chat template prints another prompt{what}, {expected!r} where the student's prints {printed!r}"
            return f"{rule}. {_SAME_TEMPLATE}"
    for modality, processor in renderer.processors.items():
        of_teacher_too = teacher.processors.get(modality)
        if of_teacher_too is None or of_teacher_too.fingerprint != processor.fingerprint:
            rule = f"it processes {modality} input in another way, or not at all: it would see other features"
            return f"{rule}. Take a teacher with the student's processor"
    return None
