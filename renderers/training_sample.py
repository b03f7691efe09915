"""Supervised training samples: a rendered conversation and the tokens of it that carry loss.

`build_training_sample` takes the whole conversation as the template prints it. `build_training_samples` also asks what
the model would have seen when it sampled each turn, and makes several samples where the template rewrites history:

    user: a / assistant: <think>r</think>b / user: c / assistant: <think>s</think>d

Qwen3's template prints the first turn without its reasoning once a user speaks again. One sample of the whole
conversation would never train `r`, and would train `b` where no model ever says it. Two samples train each turn as it
was sampled:

    user: a / assistant: [<think>r</think>b]
    user: a / assistant: b / user: c / assistant: [<think>s</think>d]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from renderers.errors import MessageLossMaskError, NoTrainedTokensError, short_repr
from renderers.messages import check_messages
from renderers.protocol import Messages, Renderer, Tools
from renderers.rendered import MultiModalData, RenderedTokens, check_roles
from renderers.sampled_turn import (
    SampledTurn,
    TokenRange,
    placed_media,
    sampled_turn,
    with_final_stop,
)
from renderers.template_renderer import TemplateRenderer


@dataclass(frozen=True)
class RenderedTrainingSample:
    """A token sequence of length n and which of its tokens carry loss.

    `loss_ranges` are half-open, ascending and apart; `trained_messages` are the indices (in the whole conversation) of
    the messages that they belong to. `rendered` holds the tokens with their attribution. The per-token columns are
    built when first read.
    """

    rendered: RenderedTokens = field(repr=False)
    loss_ranges: tuple[TokenRange, ...]
    trained_messages: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        return self.rendered.token_ids

    @cached_property
    def loss_mask(self) -> list[bool]:
        """Per token, whether predicting it is trained."""
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
        """The media of the sample; None if it shows none."""
        media = self.rendered.multi_modal_data
        return None if media is None or media.is_empty() else media

    @cached_property
    def mm_token_type_ids(self) -> list[int] | None:
        """Per token 0 for text, 1 for an image's and 2 for a video's placeholder; None if the sample shows neither."""
        return None if self.multi_modal_data is None else self.rendered.mm_token_type_ids

    @property
    def num_trained_tokens(self) -> int:
        return sum(end - start for start, end in self.loss_ranges)

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

    - `role_to_mask(message)` False takes the loss away from a message's sampled tokens.
    - `content_sft_roles`: messages of these roles carry loss on their body, never on the scaffold around it. Only body
      that is text: an image's placeholders are not predicted.
    - `message_loss_mask`, one bool (or 0/1) per message: False takes all loss away from a message.
    - `ensure_final_stop`: if the conversation ends with a trained turn that the template does not close (GLM closes it
      with the next role's token), the sample ends with the stop token that the model would sample there, with loss.

    Raises `NoTrainedTokensError` if no token carries loss, `MessageLossMaskError`, `UnknownRoleError`, and whatever
    rendering raises.
    """
    plan = _LossPlan.of(messages, role_to_mask, content_sft_roles, message_loss_mask)
    rendered = renderer.render(messages, tools=tools)
    if ensure_final_stop and len(messages) - 1 in plan.turns:
        rendered = with_final_stop(renderer, rendered, messages, len(messages) - 1, tools)
    return _with_loss([_sample(rendered, plan.turns, plan.bodies)], messages, plan)[0]


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

    That prompt is the conversation before the turn, rendered with the generation prompt; the turn follows as the
    template prints it at the end of a conversation. Where the whole conversation, rendered once, says the same for
    every trained turn, the result is that one sample. Otherwise a turn shares a sample with a later one if the later
    one's prompt continues it token for token; a sample then ends with its last trained turn. Each trained turn, and
    each body of `content_sft_roles`, carries loss in exactly one sample. Samples come in the order of their last turns.

    Options and errors are those of `build_training_sample`; `ensure_final_stop` is about the last turn of each sample.
    Also raises `UnreachableTurnError` for a trained turn that no sampling can give: the template refuses the prompt
    before it, or the prompt opens reasoning that the printed turn never closes.
    """
    plan = _LossPlan.of(messages, role_to_mask, content_sft_roles, message_loss_mask)
    whole = renderer.render(messages, tools=tools)
    found = (sampled_turn(renderer, messages, index, tools) for index in sorted(plan.turns))
    turns = [turn for turn in found if turn is not None]

    bodies = set(plan.bodies)
    samples = []
    for ending in _endings(whole, turns, bodies):
        rendered = ending.rendered
        if ensure_final_stop and ending.turns and (rendered is not whole or ending.turns[-1] == len(messages) - 1):
            rendered = with_final_stop(renderer, rendered, messages, ending.turns[-1], tools)
        sample = _sample(rendered, ending.turns, bodies)
        bodies.difference_update(sample.trained_messages)
        samples.append(sample)
    return _with_loss(samples, messages, plan)


# What carries loss.


class _LossPlan(NamedTuple):
    """The messages that carry loss: on what was sampled (`turns`), on the body (`bodies`)."""

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
        check_messages(messages)
        chosen = _chosen_messages(messages, message_loss_mask)
        body_roles = check_roles(content_sft_roles or ())
        # An assistant's body is what it sampled.
        bodies = {index for index in chosen if messages[index]["role"] in body_roles - {"assistant"}}
        turns = {
            index
            for index in chosen - bodies
            if messages[index]["role"] in body_roles or role_to_mask is None or role_to_mask(messages[index])
        }
        assistants = {index for index in turns if messages[index]["role"] == "assistant"}
        return cls(frozenset(assistants), frozenset(bodies))


def _chosen_messages(messages: Messages, mask: Sequence[bool | int] | None) -> set[int]:
    if mask is None:
        return set(range(len(messages)))
    if len(mask) != len(messages):
        raise MessageLossMaskError(
            f"message_loss_mask has {len(mask)} entries for {len(messages)} messages; give one bool per message"
        )
    for index, value in enumerate(mask):
        if value not in (0, 1):
            raise MessageLossMaskError(f"message_loss_mask[{index}] is {short_repr(value)}; an entry is a bool, 0 or 1")
    return {index for index, value in enumerate(mask) if value}


def _sample(rendered: RenderedTokens, turns: Collection[int], bodies: Collection[int]) -> RenderedTrainingSample:
    trained = [
        span
        for span in rendered.spans
        if (span.sampled and span.message_index in turns) or (span.content and span.message_index in bodies)
    ]
    # One more zero on either side: every stretch of ones then has two edges.
    mask = np.zeros(len(rendered) + 2, dtype=np.int8)
    for span in trained:
        mask[span.start + 1 : span.end + 1] = 1
    for _, where in placed_media(rendered):
        mask[where.offset + 1 : where.end + 1] = 0
    edges = np.flatnonzero(np.diff(mask)).reshape(-1, 2)
    return RenderedTrainingSample(
        rendered,
        loss_ranges=tuple((start, end) for start, end in edges.tolist()),
        trained_messages=tuple(sorted({span.message_index for span in trained})),
    )


def _with_loss(
    samples: Sequence[RenderedTrainingSample], messages: Messages, plan: _LossPlan
) -> list[RenderedTrainingSample]:
    """Those samples that train anything."""
    trained = [sample for sample in samples if sample.loss_ranges]
    if not trained:
        chosen = sorted(plan.turns | plan.bodies)
        if chosen:
            reason = f"the template prints nothing to be trained for messages {chosen}"
        elif any(message["role"] == "assistant" for message in messages):
            reason = "the options take the loss away from every assistant message"
        else:
            reason = "it has no assistant message, and content_sft_roles names no role of it"
        raise NoTrainedTokensError(f"no token of this conversation carries loss: {reason}")
    return trained


# Which turns share a sample.


class _Ending(NamedTuple):
    """Tokens of a sample and the turns that it trains."""

    rendered: RenderedTokens
    turns: list[int]


def _endings(whole: RenderedTokens, turns: Sequence[SampledTurn], bodies: Collection[int]) -> list[_Ending]:
    """The fewest token sequences that show every turn: those that no other one continues.

    `whole` is one of them if it continues the last turn, if a body stands behind that turn, or if there is no turn.
    """
    waiting = list(turns)
    candidates = [turn.rendered for turn in turns]
    if not waiting or waiting[-1].is_shown_by(whole) or max(bodies, default=-1) > waiting[-1].message_index:
        candidates.append(whole)
    endings = []
    # From the end: what a later sequence continues has found its place before its own comes.
    for rendered in reversed(candidates):
        shown = [turn.message_index for turn in waiting if turn.is_shown_by(rendered)]
        if shown or rendered is whole:
            endings.append(_Ending(rendered, shown))
            waiting = [turn for turn in waiting if turn.message_index not in shown]
    return endings[::-1]
