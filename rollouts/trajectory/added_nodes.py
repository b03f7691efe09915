"""The nodes that a turn adds to a trajectory: the new tokens of its prompt, and its completion."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from renderers import Message, RenderedTokens
from renderers.messages import is_media_part
from renderers.placement import placement_error
from rollouts.engines.protocol import NO_TOKEN, Completion
from rollouts.engines.result_checks import ending_error, top_logprobs_error
from rollouts.engines.token_checks import logprobs_error
from rollouts.errors import TrajectoryError, short_repr
from rollouts.trajectory.media_reference import MediaOfParts, MediaReference
from rollouts.trajectory.storable import copied_mapping, plain_copy
from rollouts.trajectory.token_node import (
    ROUTED_EXPERTS,
    SAMPLING_MASK,
    TOP_IDS,
    TOP_LOGPROBS,
    TokenNode,
    read_only,
    token_array,
)


def media_of(prompt: RenderedTokens) -> list[MediaReference]:
    """The media of a prompt in prompt order. Raises `TrajectoryError` for ranges outside it, or that overlap."""
    if prompt.multi_modal_data is None or not prompt.multi_modal_data.mm_placeholders:
        return []
    placed = prompt.multi_modal_data.items_with_ranges()
    error = placement_error((placeholder for _, placeholder in placed), len(prompt))
    if error is not None:
        item = placed[error.position][0]
        raise TrajectoryError(
            f"{item.modality} {item.mm_hash} {error.reason}; pass the prompt as it was rendered, with its media"
        )
    return [MediaReference(item.modality, item.mm_hash, item.source, placeholder) for item, placeholder in placed]


def completion_node(parent: int, completion: Completion, extras: Mapping[str, np.ndarray]) -> TokenNode:
    """The node of a completion. Raises `TrajectoryError`."""
    ids = token_array(completion.token_ids, "completion")
    logprobs = np.asarray(completion.logprobs)
    if logprobs.dtype.kind == "f":
        logprobs = read_only(logprobs, np.float32)
    error = ending_error(completion)
    if error is None and (wrong := logprobs_error(logprobs, len(ids))) is not None:
        error = f"{wrong}; pass the sampler's log-probability of each sampled token, a finite number of at most 0"
    if error is not None:
        raise TrajectoryError(f"completion: {error}")
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
    """The node of a prompt's tokens from `start` on: read-only int32 `ids` (n,).

    `extras` have one row for each. `references` are all media of the prompt. For `messages` and
    `num_path_messages` see `_new_messages`.
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

    A message without tokens belongs to the message after it. Whether the path holds a message that begins
    before `start` and ends after it depends on `num_path_messages`:

    - None: the path ends with a completion. It holds that message, and the new tokens close it.
    - More than the index of that message: the path ends with a prompt of so many messages, and holds it.
    - At most its index: the last tokens of that prompt only began it, as the generation prompt of a template begins an
      assistant turn. It is new.
    """
    if not messages:
        return ()
    if len(messages) != len(prompt.message_roles):
        raise TrajectoryError(
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
            raise TrajectoryError(f"message {index} contains itself, or is nested too deep to be stored") from error
    if references.parts != len(media):
        raise TrajectoryError(
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


class ReportedExtras(NamedTuple):
    """Arrays by name, with one row for each new token of the prompt and for each token of the completion."""

    prompt: dict[str, np.ndarray]
    completion: dict[str, np.ndarray]


def reported_extras(completion: Completion, prompt_tokens: int, start: int) -> ReportedExtras:
    """The arrays for the prompt's tokens from `start` on, and for the tokens of its completion.

    `routed_experts` (n, layers, experts a token): a row names the experts of the pass that *predicted* its
    token, which read the token before it. So a row depends only on the tokens before its token, every sampled
    token has a row as soon as it is sampled, and the rows from a root to a leaf, without the first row,
    belong to the inputs of a forward pass over all tokens but the last. The first token of a prompt is not
    predicted: its row is zeros. `sampling_mask` int32 (n, longest): the ids that a token was sampled from,
    then -1; -1 alone where options left ids out, and those that were kept are not known. `top_ids` int32 (n,
    k) and `top_logprobs` float32 (n, k): the arrays of `Completion.top_logprobs`. Raises `TrajectoryError`
    where counts do not agree.
    """
    end = prompt_tokens + len(completion.token_ids)
    error = _reported_error(completion, end)
    if error is not None:
        raise TrajectoryError(error)
    prompt: dict[str, np.ndarray] = {}
    sampled: dict[str, np.ndarray] = {}
    if (experts := completion.routed_experts) is not None:
        prompt[ROUTED_EXPERTS] = _predicting(experts, start, prompt_tokens)
        sampled[ROUTED_EXPERTS] = _predicting(experts, prompt_tokens, end)
    if (masks := completion.sampling_masks) is not None:
        sampled[SAMPLING_MASK] = _padded(masks)
    if (top := completion.top_logprobs) is not None:
        sampled[TOP_IDS], sampled[TOP_LOGPROBS] = top.token_ids.astype(np.int32), top.logprobs.astype(np.float32)
    return ReportedExtras(prompt, sampled)


def _reported_error(completion: Completion, tokens: int) -> str | None:
    """The first array of a completion that has a wrong type or shape; `tokens` counts those of its prompt, too."""
    experts, masks, count = completion.routed_experts, completion.sampling_masks, len(completion.token_ids)
    if experts is not None:
        if not isinstance(experts, np.ndarray) or experts.dtype.kind not in "iu":
            return f"routed experts are {short_repr(experts)}, not an array of integers"
        if experts.ndim != 3 or len(experts) != tokens - 1:
            return (
                f"routed experts of shape {experts.shape} for {tokens} tokens of prompt and completion; there is one "
                f"row for each but the last: ({tokens - 1}, layers, experts a token)"
            )
    if masks is not None:
        if not isinstance(masks, list | tuple) or not all(map(_is_row_of_ids, masks)):
            return f"sampling masks are {short_repr(masks)}, not one array of token ids per token"
        if len(masks) != count:
            return f"{len(masks)} sampling masks for {count} sampled tokens"
    return None if completion.top_logprobs is None else top_logprobs_error(completion.top_logprobs, count, None)


def _is_row_of_ids(mask: object) -> bool:
    return isinstance(mask, np.ndarray) and mask.ndim == 1 and (mask.dtype.kind in "iu" or not mask.size)


def _predicting(experts: np.ndarray, start: int, end: int) -> np.ndarray:
    """The rows of the passes that predicted tokens `start:end`, given those of the passes that read each token."""
    if start:
        return experts[start - 1 : end - 1]
    first_row = np.zeros((min(end, 1), *experts.shape[1:]), experts.dtype)
    return np.concatenate([first_row, experts[: max(end - 1, 0)]])


def _padded(masks: Sequence[np.ndarray]) -> np.ndarray:
    widths = np.array([len(mask) for mask in masks], dtype=np.intp)
    rows = np.full((len(masks), int(widths.max(initial=0))), NO_TOKEN, np.int32)
    # The empty array is for no masks at all: `concatenate` refuses an empty list.
    rows[np.arange(rows.shape[1]) < widths[:, None]] = np.concatenate([*masks, np.empty(0, np.int32)])
    return rows
