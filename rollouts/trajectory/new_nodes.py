"""The nodes that a turn adds to a trajectory: the new tokens of its prompt, and its completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from renderers import Message, RenderedTokens
from renderers.placement import placement_error
from rollouts.engines.completion_checks import logprobs_error
from rollouts.engines.protocol import Completion, ending_error
from rollouts.errors import InvalidTurnError
from rollouts.trajectory.plain_copy import copied_mapping, plain_copy
from rollouts.trajectory.token_node import MediaReference, TokenNode, extra_error, read_only, token_array


def media_of(prompt: RenderedTokens) -> list[MediaReference]:
    """The media of a prompt in prompt order. Raises `InvalidTurnError` for ranges outside it, or that overlap."""
    if prompt.multi_modal_data is None:
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
    for name, rows in extras.items():
        error = error or extra_error(name, rows, len(ids))
    if error is not None:
        raise InvalidTurnError(f"completion: {error}")
    return TokenNode(
        parent=parent,
        token_ids=ids,
        sampled=_sampled_mask(len(ids), sampled=True),
        logprobs=logprobs,
        weight_spans=tuple(completion.weight_spans),
        extras={name: read_only(rows, rows.dtype) for name, rows in extras.items()},
    )


def prompt_node(
    parent: int,
    prompt: RenderedTokens,
    ids: np.ndarray,
    start: int,
    references: Sequence[MediaReference],
    messages: Sequence[Message],
    num_path_messages: int | None,
    extras: Mapping[str, np.ndarray],
) -> TokenNode:
    """The node of a prompt's tokens from `start` on. `extras` have one row for each of them.

    `references` are all media of the prompt. For `messages` and `num_path_messages` see `_new_messages`.
    """
    media = [one.shifted(-start) for one in references if one.placeholder.offset >= start]
    new_messages = _new_messages(prompt, start, messages, num_path_messages)
    return TokenNode(
        parent=parent,
        token_ids=read_only(ids[start:], np.int32),  # a view would keep the whole prompt of every turn in memory
        sampled=_sampled_mask(len(ids) - start, sampled=False),
        logprobs=_NO_LOGPROBS[:],  # an array of its own: equal nodes are encoded as equal bytes
        media=tuple(media),
        content=_content_mask(prompt, start) if prompt.spans else None,
        messages=_with_sources(new_messages, media, len(messages) - len(new_messages)) if messages else (),
        extras={name: read_only(rows, rows.dtype) for name, rows in extras.items()},
    )


def _content_mask(prompt: RenderedTokens, start: int) -> np.ndarray:
    """bool, True on message bodies, of the tokens from `start` on."""
    mask = np.zeros(len(prompt) - start, dtype=bool)
    for span in prompt.spans:
        if span.content and span.end > start:
            mask[max(span.start - start, 0) : span.end - start] = True
    mask.setflags(write=False)
    return mask


def _sampled_mask(length: int, *, sampled: bool) -> np.ndarray:
    """bool (length,), all True or all False: for usual lengths a view of an array that all nodes share."""
    shared = _SAMPLED if sampled else _NOT_SAMPLED
    return shared[:length] if length <= len(shared) else read_only(np.full(length, sampled), np.bool_)


_SAMPLED: Final = read_only(np.ones(4096), np.bool_)
_NOT_SAMPLED: Final = read_only(np.zeros(4096), np.bool_)
_NO_LOGPROBS: Final = read_only((), np.float32)


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


def _with_sources(
    messages: Sequence[Message], media: Sequence[MediaReference], first_index: int
) -> tuple[Message, ...]:
    """Copies of the messages in which each medium is replaced by its source; `first_index` is for errors."""
    references = iter(media)
    copies: list[Message] = []
    for index, message in enumerate(messages, first_index):
        try:
            copies.append(_message_with_sources(message, references))
        except RecursionError as error:
            raise InvalidTurnError(f"message {index} contains itself, or is nested too deep to be stored") from error
        except _NoReferenceLeftError as error:
            raise InvalidTurnError(
                f"the messages have more media than the prompt, {len(media)} from message {first_index} to {index}; "
                "pass the messages of the prompt"
            ) from error
    if unused := len(list(references)):
        raise InvalidTurnError(
            f"the prompt has more media than its messages, {len(media)} and {len(media) - unused} from message "
            f"{first_index} on; pass the messages of the prompt"
        )
    return tuple(copies)


class _NoReferenceLeftError(Exception):
    pass


def _message_with_sources(message: Message, references: Iterator[MediaReference]) -> Message:
    copied: dict[str, Any] = {}
    for key, value in message.items():
        if key == "content" and not isinstance(value, str) and isinstance(value, Sequence):
            copied[key] = [_part_with_source(part, references) for part in value]
        else:
            copied[key] = plain_copy(value)
    return cast(Message, copied)


def _part_with_source(part: Any, references: Iterator[MediaReference]) -> Any:
    if isinstance(part, str) or part.get("type") == "text":
        return part if isinstance(part, str) else copied_mapping(part)
    reference = next(references, None)
    if reference is None:
        raise _NoReferenceLeftError
    return {"type": reference.modality, reference.modality: reference.source}
