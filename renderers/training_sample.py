"""Supervised training samples: a rendered conversation and which of its tokens carry loss.

`build_training_sample` uses the whole conversation as the template prints it. `build_training_samples` puts
each turn behind the prompt that the model would have seen, and makes several samples where the template
rewrites history:

    user: a / assistant: <think>r</think>b / user: c / assistant: <think>s</think>d

Qwen3's template prints the first turn without its reasoning once another user message follows. One sample
of the whole conversation would never train `r`, and would train `b` behind a prompt that no model ever
gets. Two samples train each turn as it was sampled:

    user: a / assistant: [<think>r</think>b]
    user: a / assistant: b / user: c / assistant: [<think>s</think>d]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from renderers.errors import ConfigError, RendererError, unreachable_turn
from renderers.messages import check_messages
from renderers.parsing.json_text import no_object_reason
from renderers.protocol import Messages, Renderer, Tools
from renderers.rendered import MultiModalData, RenderedTokens, check_roles
from renderers.sampled_turn import (
    SampledTurn,
    TokenRange,
    check_are_printed,
    media_with_ranges,
    sampled_turn,
    with_final_stop,
)
from renderers.template_renderer import TemplateRenderer


@dataclass(frozen=True, init=False)
class RenderedTrainingSample:
    """A token sequence and which of its tokens carry loss.

    `loss_ranges` are half-open, ascending and do not touch; `trained_messages` are the indices (in the whole
    conversation) of the messages that they belong to. `rendered` holds the tokens with their attribution. The
    per-token columns are built when first read.
    """

    rendered: RenderedTokens = field(repr=False)
    loss_ranges: tuple[TokenRange, ...]
    trained_messages: tuple[int, ...]

    def __init__(
        self,
        rendered: RenderedTokens | None = None,
        loss_ranges: tuple[TokenRange, ...] = (),
        trained_messages: tuple[int, ...] = (),
        *,
        token_ids: Sequence[int] = (),
        loss_mask: Sequence[bool] = (),
        multi_modal_data: MultiModalData | None = None,
        mm_token_type_ids: list[int] | None = None,
    ) -> None:
        """From a rendering and its ranges, or from columns: tokens then have no attribution."""
        if rendered is None:
            rendered = RenderedTokens(list(token_ids), multi_modal_data=multi_modal_data)
            loss_ranges = _runs(np.asarray(loss_mask, dtype=bool))
            if mm_token_type_ids is not None:
                self.__dict__["mm_token_type_ids"] = mm_token_type_ids
        self.__dict__.update(rendered=rendered, loss_ranges=loss_ranges, trained_messages=trained_messages)

    @property
    def token_ids(self) -> list[int]:
        return self.rendered.token_ids

    @cached_property
    def loss_mask(self) -> list[bool]:
        """Per token, whether it carries loss."""
        mask = [False] * len(self)
        for start, end in self.loss_ranges:
            mask[start:end] = [True] * (end - start)
        return mask

    @property
    def message_indices(self) -> list[int]:
        """Per token, the index of its message in the whole conversation; -1 is scaffold without a message."""
        return self.rendered.message_indices

    @property
    def multi_modal_data(self) -> MultiModalData | None:
        """The media of the sample; None if it has none."""
        media = self.rendered.multi_modal_data
        return None if media is None or media.is_empty() else media

    @cached_property
    def mm_token_type_ids(self) -> list[int] | None:
        """Per token 0 for text, 1 for an image placeholder, 2 for a video placeholder; None without media."""
        return None if self.multi_modal_data is None else self.rendered.mm_token_type_ids

    def __len__(self) -> int:
        return len(self.token_ids)


def build_training_sample(
    renderer: Renderer,
    messages: Messages,
    *,
    tools: Tools | None = None,
    role_to_mask: Callable[[Mapping[str, Any]], bool] | None = None,
    content_sft_roles: Collection[str] | None = None,
    ensure_final_stop: bool = False,
    message_loss_mask: Sequence[bool | int] | None = None,
) -> RenderedTrainingSample:
    """The whole conversation as the template prints it, with loss on what the model would have sampled.

    - `role_to_mask(message)` False: the sampled tokens of this message carry no loss.
    - `content_sft_roles`: messages of these roles carry loss on the text of their body, never on the scaffold around it
      or on placeholders of media.
    - `message_loss_mask`, one bool (or 0/1) per message. False: no token of this message carries loss.
    - `ensure_final_stop`: if the conversation ends with an assistant's turn that the template does not close (GLM
      closes it with the next role's token), the sample ends with the stop token that the model would sample there. It
      carries loss if the turn does.

    Content that a template prints behind the results of its own message's calls (Gemma 4) carries no loss.
    The sample may have no token with loss. Raises `RendererError`, `MessageError`, the errors of rendering, and
    `MessageError` for a trained turn without content and calls, of which the template prints no content, calls
    or reasoning, or with a call whose arguments are no JSON object; reasoning before the last message of a user may be
    missing.
    """
    plan = _LossPlan.of(messages, role_to_mask, content_sft_roles, message_loss_mask)
    rendered = renderer.render(messages, tools=tools)
    check_are_printed(renderer, messages, plan.turns, tools, rendered)
    if ensure_final_stop and messages and messages[-1]["role"] == "assistant":
        rendered = with_final_stop(renderer, rendered, messages, len(messages) - 1, tools)
    return _sample(rendered, plan.turns, plan.bodies)


def build_training_samples(
    renderer: TemplateRenderer,
    messages: Messages,
    *,
    tools: Tools | None = None,
    role_to_mask: Callable[[Mapping[str, Any]], bool] | None = None,
    content_sft_roles: Collection[str] | None = None,
    ensure_final_stop: bool = False,
    message_loss_mask: Sequence[bool | int] | None = None,
) -> list[RenderedTrainingSample]:
    """As few samples as possible in which every trained turn follows exactly the prompt that the model would have seen.

    That prompt is the conversation before the turn, rendered with the generation prompt; the turn follows
    as the template prints it at the end of a conversation. Where the whole conversation, rendered once, has
    the same tokens for every trained turn, the result is that one sample. Otherwise a turn shares a sample
    with a later one if the later one's prompt continues it token for token; a sample then ends with its
    last trained turn. Each trained turn, and each body of `content_sft_roles`, carries loss in exactly one
    sample. Samples are ordered by their last turns.

    Options and errors are those of `build_training_sample`; `ensure_final_stop` applies to the last turn of
    each sample. Raises `RendererError` if no token of any sample carries loss, and `MessageError` for
    a trained turn that the model would not sample: the template refuses the prompt before it, or prints
    nothing of its content, calls or reasoning; or the prompt opens reasoning that the printed turn never
    closes.
    """
    plan = _LossPlan.of(messages, role_to_mask, content_sft_roles, message_loss_mask)
    if not plan.turns | plan.bodies:
        raise RendererError(f"no token of this conversation carries loss: {_why_none_is_chosen(messages)}")
    whole = renderer.render(messages, tools=tools)
    sampled = (sampled_turn(renderer, messages, index, tools) for index in sorted(plan.turns))
    turns = [turn for turn in sampled if turn is not None]

    bodies = set(plan.bodies)
    samples = []
    for rendered, trained in _shared_sequences(whole, turns, bodies):
        if ensure_final_stop and trained and (rendered is not whole or trained[-1] == len(messages) - 1):
            rendered = with_final_stop(renderer, rendered, messages, trained[-1], tools)
        sample = _sample(rendered, trained, bodies)
        bodies.difference_update(sample.trained_messages)
        samples.append(sample)
    with_loss = [sample for sample in samples if sample.loss_ranges]
    if not with_loss:
        raise RendererError(
            "no token of this conversation carries loss: the template prints nothing to be trained of "
            f"messages {sorted(plan.turns | plan.bodies)}; choose others, or load the renderer with a "
            "chat_template= that does"
        )
    return with_loss


# Which messages carry loss.


class _LossPlan(NamedTuple):
    """The messages that carry loss on their sampled tokens (`turns`) or on their body (`bodies`)."""

    turns: frozenset[int]
    bodies: frozenset[int]

    @classmethod
    def of(
        cls,
        messages: Messages,
        role_to_mask: Callable[[Mapping[str, Any]], bool] | None,
        content_sft_roles: Collection[str] | None,
        message_loss_mask: Sequence[bool | int] | None,
    ) -> _LossPlan:
        checked = check_messages(messages)
        chosen = _chosen_messages(messages, message_loss_mask)
        body_roles = check_roles(content_sft_roles or ())
        # The body of an assistant message is its sampled tokens.
        bodies = {index for index in chosen if messages[index]["role"] in body_roles - {"assistant"}}
        turns = {
            index
            for index in chosen - bodies
            if messages[index]["role"] in body_roles or role_to_mask is None or role_to_mask(messages[index])
        }
        assistants = {index for index in turns if messages[index]["role"] == "assistant"}
        for index in sorted(assistants):
            _check_turn(checked[index], index)
        return cls(frozenset(assistants), frozenset(bodies))


def _why_none_is_chosen(messages: Messages) -> str:
    roles = [message["role"] for message in messages]
    if "assistant" in roles:
        turns = [index for index, role in enumerate(roles) if role == "assistant"]
        return f"the options (role_to_mask, message_loss_mask) exclude all assistant messages, {turns}; choose one"
    return (
        f"it has no assistant message (its roles: {', '.join(dict.fromkeys(roles)) or 'none'}). Add the "
        "turn to be trained, or name other roles in content_sft_roles"
    )


def _check_turn(message: Mapping[str, Any], index: int) -> None:
    """Raise `MessageError` for an empty turn, and for arguments of a call that are no JSON object."""
    if "content" not in message and not message.get("tool_calls") and not message.get("reasoning_content"):
        reason = "its content is None, and it has no tool_calls"
        raise unreachable_turn(index, reason, cure='give its content: "" for an answer without text')
    for number, call in enumerate(message.get("tool_calls", ())):
        if fault := no_object_reason(call["function"]["arguments"]):
            cure = "give a dict, or the text of a JSON object: {} for none"
            raise unreachable_turn(index, f"in the arguments of tool_calls[{number}], {fault}", cure=cure)


def _chosen_messages(messages: Messages, mask: Sequence[bool | int] | None) -> set[int]:
    if mask is None:
        return set(range(len(messages)))
    if len(mask) != len(messages):
        raise ConfigError(
            "message_loss_mask", mask, [f"a list of {len(messages)} values, True or False for each message"]
        )
    for index, value in enumerate(mask):
        if isinstance(value, float) or value not in (0, 1):
            raise ConfigError(f"message_loss_mask[{index}]", value, ["True", "False"])
    return {index for index, value in enumerate(mask) if value}


def _sample(rendered: RenderedTokens, turns: Collection[int], bodies: Collection[int]) -> RenderedTrainingSample:
    trained = [
        span
        for span in rendered.spans
        if (span.sampled and span.message_index in turns) or (span.content and span.message_index in bodies)
    ]
    mask = np.zeros(len(rendered), dtype=bool)
    for span in trained:
        mask[span.start : span.end] = True
    for _, placeholder in media_with_ranges(rendered):
        mask[placeholder.offset : placeholder.end] = False
    return RenderedTrainingSample(
        rendered,
        loss_ranges=_runs(mask),
        trained_messages=tuple(sorted({span.message_index for span in trained})),
    )


def _runs(mask: np.ndarray) -> tuple[TokenRange, ...]:
    """The half-open ranges in which a bool column is True."""
    # One more False on either side, so that every run has two edges.
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return tuple((start, end) for start, end in edges.tolist())


# Which turns share a sample.


def _shared_sequences(
    whole: RenderedTokens, turns: Sequence[SampledTurn], bodies: Collection[int]
) -> list[tuple[RenderedTokens, list[int]]]:
    """The fewest token sequences that hold every turn, each with the turns that it trains.

    A sequence is left out where another one continues it. `whole` is one of them if it continues the last
    turn, if a trained body comes after that turn, or if there is no turn.
    """
    remaining = list(turns)
    candidates = [turn.rendered for turn in turns]
    if not remaining or remaining[-1].is_prefix_of(whole) or max(bodies, default=-1) > remaining[-1].message_index:
        candidates.append(whole)
    sequences = []
    # Longest sequences first: each takes all turns that it continues.
    for rendered in reversed(candidates):
        trained = [turn.message_index for turn in remaining if turn.is_prefix_of(rendered)]
        if trained or rendered is whole:
            sequences.append((rendered, trained))
            remaining = [turn for turn in remaining if turn.message_index not in trained]
    return sequences[::-1]
