"""The nodes that a turn adds to a trajectory: the new tokens of its prompt, and its completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from renderers import Message, RenderedTokens
from renderers.messages import is_media_part
from renderers.placement import placement_error
from rollouts.engines.protocol import Completion
from rollouts.engines.result_checks import ending_error
from rollouts.engines.token_checks import logprobs_error
from rollouts.errors import InvalidTurnError
from rollouts.trajectory.media_reference import MediaOfParts, MediaReference
from rollouts.trajectory.storable import copied_mapping, plain_copy
from rollouts.trajectory.token_node import TokenNode, read_only, token_array


def media_of(prompt: RenderedTokens) -> list[MediaReference]:
    """The media of a prompt in prompt order. Raises `InvalidTurnError` for ranges outside it, or that overlap."""
    if prompt.multi_modal_data is None or not prompt.multi_modal_data.mm_placeholders:
        return []
    placed = prompt.multi_modal_data.items_with_ranges()
    error = placement_error((placeholder for _, placeholder in placed), len(prompt))
    if error is not None:
        item = placed[error.position][0]
        raise InvalidTurnError(
            f"{item.modality} {item.mm_hash} {error.reason}; pass the prompt as it was rendered, with its media"
        )
    return [MediaReference(item.modality, item.mm_hash, item.source, placeholder) for item, placeholder in placed]


def completion_node(parent: int, completion: Completion, extras: Mapping[str, np.ndarray]) -> TokenNode:
    """The node of a completion. Raises `InvalidTurnError`."""
    ids = token_array(completion.token_ids, "completion")
    logprobs = np.asarray(completion.logprobs)
    if logprobs.dtype.kind == "f":
        logprobs = read_only(logprobs, np.float32)
    error = ending_error(completion)
    if error is None and (wrong := logprobs_error(logprobs, len(ids))) is not None:
        error = f"{wrong}; pass the sampler's log-probability of each sampled token, a finite number of at most 0"
    if error is not None:
        raise InvalidTurnError(f"completion: {error}")
    return TokenNode(
        parent=parent,
        token_ids=ids,
        sampled=mask_of(b"\x01" * len(ids)),
        logprobs=logprobs,
        weight_spans=tuple(completion.weight_spans),
        extras={name: read_only(rows, None) for name, rows in extras.items()},
    )


def prompt_node(
    parent: int,
    prompt: RenderedTokens,
    start: int,
    ids: np.ndarray,
    references: Sequence[MediaReference],
    messages: Sequence[Message],
    num_path_messages: int | None,
    extras: Mapping[str, np.ndarray],
) -> TokenNode:
    """The node of a prompt's tokens from `start` on: `ids`, read-only int32 (n,). `extras` have one row for each.

    `references` are all media of the prompt. For `messages` and `num_path_messages` see `_new_messages`.
    """
    media = [one.shifted(-start) for one in references if one.placeholder.offset >= start] if references else []
    new_messages = _new_messages(prompt, start, messages, num_path_messages)
    content = _content_mask(prompt, start) if prompt.spans else None
    stored = with_sources(new_messages, media, len(messages) - len(new_messages)) if messages else ()
    return TokenNode(
        parent=parent,
        token_ids=ids,
        sampled=mask_of(bytes(len(ids))),
        logprobs=read_only((), np.float32),
        media=tuple(media),
        content=content,
        messages=stored,
        extras={name: read_only(rows, rows.dtype) for name, rows in extras.items()},
    )


def _content_mask(prompt: RenderedTokens, start: int) -> np.ndarray:
    """bool, True on message bodies, of the tokens from `start` on."""
    length = len(prompt.token_ids)
    mask = bytearray(length - start)
    for first, end, _, _, content in prompt.spans:
        if content and end > start:
            first, end = max(first, start), min(end, length)
            mask[first - start : end - start] = b"\x01" * (end - first)
    return mask_of(bytes(mask))


def mask_of(values: bytes) -> np.ndarray:
    """Zeros and ones as read-only bool (n,): made faster than by numpy, and with the interpreter's lock kept."""
    return np.frombuffer(values, np.bool_)


def _new_messages(
    prompt: RenderedTokens, start: int, messages: Sequence[Message], num_path_messages: int | None
) -> Sequence[Message]:
    """The messages of a prompt that the path up to token `start` does not hold yet.

    A message without tokens belongs to the message after it. Whether the path holds a message that begins before
    `start` and ends after it depends on `num_path_messages`:

    - None: the path ends with a completion. It holds that message, and the new tokens close it.
    - More than the index of that message: the path ends with a prompt of so many messages, and holds it.
    - At most its index: the last tokens of that prompt only began it, as the generation prompt of a template begins an
      assistant turn. It is new.
    """
    if not messages:
        return ()
    if len(messages) != len(prompt.message_roles):
        raise InvalidTurnError(
            f"{len(messages)} messages were given for a prompt of {len(prompt.message_roles)}; pass the messages that "
            "it was rendered from, or for a bridge the new messages"
        )
    known = range(len(prompt.message_roles))
    if not any(first < start and index in known for first, _, index, _, _ in prompt.spans):  # as after a bridge
        return messages
    spans = prompt.message_token_spans()
    first = len(messages)
    for index in range(len(messages) - 1, -1, -1):
        span = spans[index]
        if span is not None and span[0] < start:
            is_complete = span[1] <= start
            if is_complete or num_path_messages is None or index < num_path_messages:
                break
        first = index
    return messages[first:]


def with_sources(messages: Sequence[Message], media: Sequence[MediaReference], first_index: int) -> tuple[Message, ...]:
    """Copies of the messages in which each medium is replaced by its source; `first_index` is for errors."""
    references = MediaOfParts(media)
    copies: list[Message] = []
    for index, message in enumerate(messages, first_index):
        try:
            copies.append(_message_with_sources(message, references))
        except RecursionError as error:
            raise InvalidTurnError(f"message {index} contains itself, or is nested too deep to be stored") from error
    if references.parts != len(media):
        raise InvalidTurnError(
            f"the messages from {first_index} on have {references.parts} media, and the prompt has {len(media)} there; "
            "pass the messages of the prompt"
        )
    return tuple(copies)


def _message_with_sources(message: Message, references: MediaOfParts[MediaReference]) -> Message:
    copied: dict[str, Any] = {}
    for key, value in message.items():
        if type(value) is str:
            copied[key] = value
        elif key == "content" and not isinstance(value, str) and isinstance(value, Sequence):
            copied[key] = [_part_with_source(part, references) for part in value]
        else:
            copied[key] = plain_copy(value)
    return cast(Message, copied)


def _part_with_source(part: Any, references: MediaOfParts[MediaReference]) -> Any:
    if not is_media_part(part):
        return part if isinstance(part, str) else copied_mapping(part)
    reference = references.take(part)
    if reference is None:  # an error of `with_sources`, which counts the parts
        return None
    return {"type": reference.modality, reference.modality: reference.source}
