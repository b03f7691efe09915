"""An assistant turn as the model would have sampled it: the prompt before it, then its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from renderers.errors import TemplateError, UnreachableTurnError, short_repr
from renderers.media.item import MediaItem
from renderers.messages import NOUNS, check_messages
from renderers.protocol import Messages, Renderer, Tools
from renderers.rendered import PlaceholderRange, RenderedTokens, TokenSpan, merge_adjacent
from renderers.template_renderer import TemplateRenderer

#: A half-open range of tokens.
TokenRange = tuple[int, int]


class SampledTurn(NamedTuple):
    """An assistant turn after its prompt: `rendered` is the prompt, and from token `start` on the turn."""

    message_index: int
    start: int
    rendered: RenderedTokens

    def is_prefix_of(self, other: RenderedTokens) -> bool:
        """Whether another rendering begins with prompt and turn, and trains the same tokens of the turn."""
        end = len(self.rendered)
        if other.token_ids[:end] != self.rendered.token_ids:
            return False
        # One token more is the stop token that the template prints with the next message (GLM).
        return sampled_runs(other, self.message_index) in ([(self.start, end)], [(self.start, end + 1)])


def sampled_turn(renderer: TemplateRenderer, messages: Messages, index: int, tools: Tools | None) -> SampledTurn | None:
    """The turn `index` after its prompt, or None if the template prints nothing of it."""
    try:
        printed = renderer.render(messages[: index + 1], tools=tools)
        prompt = renderer.render(messages[:index], tools=tools, add_generation_prompt=True)
    except TemplateError as error:
        raise UnreachableTurnError(
            index, f"the template refuses to print the prompt before it ({error.template_message})"
        ) from error
    runs = sampled_runs(printed, index)
    if not runs:
        return None
    if len(runs) > 1:
        raise UnreachableTurnError(index, f"the template prints it in {len(runs)} separate pieces")
    start, end = runs[0]
    for item, placeholder in media_with_ranges(printed):
        if start <= placeholder.offset < end:
            raise UnreachableTurnError(index, f"it shows {NOUNS[item.modality]}")
    turn_ids = printed.token_ids[start:end]
    if printed.token_ids[:start] != prompt.token_ids:
        merged = _merged_ids(renderer, prompt.token_ids, printed.token_ids[:start])
        if merged is None:
            _check_parses_back(renderer, messages[index], index, prompt.token_ids, turn_ids, tools)
        turn_ids = [*(merged or ()), *turn_ids]
    ids = [*prompt.token_ids, *turn_ids]
    rendered = RenderedTokens(
        ids,
        (*prompt.spans, TokenSpan(len(prompt), len(ids), index, sampled=True, content=True)),
        printed.message_roles,
        prompt.multi_modal_data,
        message_tool_names=printed.message_tool_names,
        placeholder_token_ids=printed.placeholder_token_ids,
    )
    return SampledTurn(index, len(prompt), rendered)


def _merged_ids(renderer: TemplateRenderer, prompt_ids: Sequence[int], printed_ids: Sequence[int]) -> list[int] | None:
    """The ids of the start of a turn, where the printed ids merge it with the end of the prompt into one token.

    Where `<think>\\n` and `\\n</think>` are printed together, the two line breaks are one token. After a prompt that
    ends with the first line break, the model samples the second as a separate token. None if the printed text does not
    begin with the prompt's text.
    """
    shared = _shared_length(prompt_ids, printed_ids)
    prompt, printed = (renderer.tokenizer.decode(ids[shared:]) for ids in (prompt_ids, printed_ids))
    return renderer.tokenizer.encode_run(printed[len(prompt) :]).ids if printed.startswith(prompt) else None


def _shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = min(len(first), len(second))
    differ = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(differ[0]) if len(differ) else length


def _check_parses_back(
    renderer: TemplateRenderer,
    message: Mapping[str, Any],
    index: int,
    prompt_ids: Sequence[int],
    turn_ids: Sequence[int],
    tools: Tools | None,
) -> None:
    """Raise `UnreachableTurnError` if the turn, after its prompt, parses to another message.

    A template may print history without what the prompt opened (`<think>`); the same ids then mean something else.
    """
    parsed = renderer.parse_response(turn_ids, tools=tools, prompt_ids=prompt_ids)
    if not parsed.reasoning_complete:
        tail = renderer.tokenizer.decode(prompt_ids[-4:])
        raise UnreachableTurnError(index, f"the prompt ends with {tail!r}, and the printed turn never ends reasoning")
    (checked,) = check_messages([message])
    if not _is_content_of(parsed.content.strip(), checked):
        raise UnreachableTurnError(
            index, f"after its prompt the printed turn is parsed as {short_repr(parsed.content)}"
        )


def _is_content_of(parsed: str, message: Mapping[str, Any]) -> bool:
    """Whether parsed content is that of the checked message, except for white space around it."""
    content = message.get("content") or ""
    # A template that reads strings gets several texts with a line break between them.
    texts = [content] if isinstance(content, str) else [part["text"] for part in content if part.get("text")]
    return any(_matches(parsed, separator.join(texts).strip(), message) for separator in ("", "\n"))


def _matches(parsed: str, text: str, message: Mapping[str, Any]) -> bool:
    """Whether `text`, the content of the checked message, can be parsed as `parsed`."""
    reasoning = message.get("reasoning_content", "").strip()
    if reasoning and reasoning in parsed and reasoning not in text:
        return False
    if message.get("tool_calls"):  # in a syntax that the format may not know; calls follow the content
        return parsed.startswith(text)
    # Reasoning inside the message's content is parsed as reasoning, and not as content.
    return parsed == text or (parsed != "" and text.endswith(parsed))


def sampled_runs(rendered: RenderedTokens, index: int) -> list[TokenRange]:
    """The token ranges that the model would have sampled of message `index`."""
    spans = (span for span in rendered.spans if span.sampled and span.message_index == index)
    return merge_adjacent((span.start, span.end) for span in spans)


# Stop tokens that the template prints only with the next message.


def with_final_stop(
    renderer: Renderer, rendered: RenderedTokens, messages: Messages, turn: int, tools: Tools | None
) -> RenderedTokens:
    """The tokens up to the end of `turn`, then its stop token if the template prints none."""
    runs = sampled_runs(rendered, turn)
    stops = renderer.get_stop_token_ids()
    if not runs or rendered.token_ids[runs[-1][1] - 1] in stops:
        return rendered
    end = runs[-1][1]
    stop = _stop_token(renderer, messages, turn, tools, stops)
    return replace(
        rendered,
        token_ids=[*rendered.token_ids[:end], stop],
        spans=(
            *(span for span in rendered.spans if span.end <= end),
            TokenSpan(end, end + 1, turn, sampled=True, content=True),
        ),
    )


def _stop_token(renderer: Renderer, messages: Messages, turn: int, tools: Tools | None, stops: Sequence[int]) -> int:
    """The stop token of the turn that the template prints once a message follows; the first of `stops` if none.

    GLM ends a turn with the next role's token, so a turn with a tool call has another stop token than one without.
    """
    calls = messages[turn].get("tool_calls")
    following: Mapping[str, Any] = {"role": "user", "content": "."}
    if calls:
        name = calls[-1]["function"]["name"]
        following = {"role": "tool", "content": ".", "tool_call_id": calls[-1].get("id") or "call00000", "name": name}
    try:
        followed = renderer.render([*messages[: turn + 1], following], tools=tools)
    except TemplateError:
        return stops[0]
    runs = sampled_runs(followed, turn)
    last = followed.token_ids[runs[-1][1] - 1] if runs else stops[0]
    return last if last in stops else stops[0]


def media_with_ranges(rendered: RenderedTokens) -> list[tuple[MediaItem, PlaceholderRange]]:
    return [] if rendered.multi_modal_data is None else rendered.multi_modal_data.items_with_ranges()
