"""What a prompt adds to a path: its new tokens with their attribution, media and messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from renderers import Message, RenderedTokens
from renderers.placement import item_placement_error
from rollouts.errors import InvalidTurnError
from rollouts.trajectory.plain_copy import copied_mapping, plain_copy
from rollouts.trajectory.token_node import MediaReference, TokenNode, frozen, within


def media_of(prompt: RenderedTokens) -> list[MediaReference]:
    """The media of a prompt in prompt order. Raises `InvalidTurnError` for ranges outside it, or over each other."""
    placed = prompt.multi_modal_data.items_with_ranges() if prompt.multi_modal_data is not None else []
    if (error := item_placement_error(placed, len(prompt))) is not None:
        raise InvalidTurnError(f"{error}; pass the prompt as it was rendered, with its media")
    return [MediaReference(item.modality, item.mm_hash, item.source, where) for item, where in placed]


def prompt_node(
    parent: int,
    prompt: RenderedTokens,
    ids: np.ndarray,
    start: int,
    references: Sequence[MediaReference],
    messages: Sequence[Message],
    said: int | None,
    extras: Mapping[str, np.ndarray],
) -> TokenNode:
    """What a prompt adds from token `start` on, which is what `extras` have rows for.

    `messages` and `said`: see `_first_shown`.
    """
    media = within(references, start, len(ids))
    shown = _first_shown(prompt, start, messages, said)
    return TokenNode(
        parent=parent,
        token_ids=frozen(ids[start:], np.int32),  # a view would keep the whole prompt, in every turn again
        sampled=frozen(np.zeros(len(ids) - start, dtype=bool), np.bool_),
        logprobs=frozen(np.empty(0, dtype=np.float32), np.float32),
        media=media,
        content=_content(prompt, start) if prompt.spans else None,
        messages=_with_sources(shown, media) if messages else (),
        extras={name: frozen(rows, rows.dtype) for name, rows in extras.items()},
    )


def _content(prompt: RenderedTokens, start: int) -> np.ndarray:
    """bool, True on message body, of the tokens from `start` on."""
    mask = np.zeros(len(prompt) - start, dtype=bool)
    for span in prompt.spans:
        if span.content and span.end > start:
            mask[max(span.start - start, 0) : span.end - start] = True
    return frozen(mask, np.bool_)


def _first_shown(
    prompt: RenderedTokens, start: int, messages: Sequence[Message], said: int | None
) -> Sequence[Message]:
    """The messages that the tokens from `start` on are the first to show.

    One that prints nothing goes with the one behind it. One that begins before `start` and ends behind it was said
    already if a completion ends at `start` (`said` None): what follows is its closing. If a prompt ends there, that
    prompt's last tokens only asked for it, as a template asks for an assistant's turn, unless it is one of the first
    `said` messages, which the path holds.
    """
    if not messages:
        return ()
    if len(messages) != len(prompt.message_roles):
        raise InvalidTurnError(
            f"{len(messages)} messages were given for a prompt of {len(prompt.message_roles)}; pass those that it was "
            "rendered from, or for a bridge the new ones"
        )
    spans = prompt.message_token_spans()
    first = len(messages)
    for index in range(len(messages) - 1, -1, -1):
        span = spans[index]
        if span is not None and span[0] < start and (span[1] <= start or said is None or index < said):
            break
        first = index
    return messages[first:]


def _with_sources(messages: Sequence[Message], media: Sequence[MediaReference]) -> tuple[Message, ...]:
    """Copies of the messages with the sources of their media in place of whatever held them."""
    sources = iter(media)
    kept: list[Message] = []
    for message in messages:
        try:
            kept.append(_message_with_sources(message, sources))
        except RecursionError as error:
            raise InvalidTurnError("a message contains itself, or nests too deeply to be stored") from error
    if next(sources, None) is not None:
        raise InvalidTurnError("the prompt shows more media than its messages hold; pass the messages it shows")
    return tuple(kept)


def _message_with_sources(message: Message, sources: Iterator[MediaReference]) -> Message:
    copied: dict[str, Any] = {}
    for key, value in message.items():
        if key == "content" and isinstance(value, Sequence) and not isinstance(value, str):
            copied[key] = [_with_source(part, sources) for part in value]
        else:
            copied[key] = plain_copy(value)
    return cast(Message, copied)


def _with_source(part: Any, sources: Iterator[MediaReference]) -> Any:
    if isinstance(part, str) or part.get("type") == "text":
        return part if isinstance(part, str) else copied_mapping(part)
    reference = next(sources, None)
    if reference is None:
        raise InvalidTurnError("the messages hold more media than the prompt shows; pass the messages it was made of")
    return {"type": reference.modality, reference.modality: reference.source}
