"""A turn as the model would have sampled it: the prompt that asks for it, then its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from renderers.errors import TemplateError, UnreachableTurnError
from renderers.media.item import MediaItem
from renderers.messages import check_messages
from renderers.protocol import Messages, Renderer, Tools
from renderers.rendered import PlaceholderRange, RenderedTokens, TokenSpan
from renderers.template_renderer import TemplateRenderer

#: A half-open range of tokens.
TokenRange = tuple[int, int]


class SampledTurn(NamedTuple):
    """A turn as it was sampled: `rendered` is the prompt, then from token `start` on the turn itself."""

    message_index: int
    start: int
    rendered: RenderedTokens

    def is_shown_by(self, other: RenderedTokens) -> bool:
        """Whether another rendering begins with prompt and turn, and would train the same tokens of it."""
        end = len(self.rendered)
        if other.token_ids[:end] != self.rendered.token_ids:
            return False
        # One token more is the stop token that only the next message brings (GLM).
        return sampled_runs(other, self.message_index) in ([(self.start, end)], [(self.start, end + 1)])


def sampled_turn(renderer: TemplateRenderer, messages: Messages, index: int, tools: Tools | None) -> SampledTurn | None:
    """The turn behind the prompt that asks for it, or None if the template prints nothing of it."""
    try:
        printed = renderer.render(messages[: index + 1], tools=tools)
        prompt = renderer.render(messages[:index], tools=tools, add_generation_prompt=True)
    except TemplateError as error:
        raise UnreachableTurnError(index, f"the template refuses to ask for it ({error.template_message})") from error
    runs = sampled_runs(printed, index)
    if not runs:
        return None
    if len(runs) > 1:
        raise UnreachableTurnError(index, f"the template prints it in {len(runs)} separate pieces")
    start, end = runs[0]
    if any(start <= where.offset < end for _, where in placed_media(printed)):
        raise UnreachableTurnError(index, "it shows an image")
    words = printed.token_ids[start:end]
    if printed.token_ids[:start] != prompt.token_ids:
        swallowed = _swallowed_words(renderer, prompt.token_ids, printed.token_ids[:start])
        if swallowed is None:
            _check_reads_back(renderer, messages[index], index, prompt.token_ids, words, tools)
        words = [*(swallowed or ()), *words]
    ids = [*prompt.token_ids, *words]
    rendered = RenderedTokens(
        ids,
        (*prompt.spans, TokenSpan(len(prompt), len(ids), index, sampled=True, content=True)),
        printed.message_roles,
        prompt.multi_modal_data,
        message_tool_names=printed.message_tool_names,
        placeholder_token_ids=printed.placeholder_token_ids,
    )
    return SampledTurn(index, len(prompt), rendered)


def _swallowed_words(
    renderer: TemplateRenderer, prompt_ids: Sequence[int], printed_ids: Sequence[int]
) -> list[int] | None:
    """First words that a printed token merges with the end of the prompt, as the model samples them: apart from it.

    Printed in one go, `<think>\\n` and `\\n</think>` make one token of the two line breaks. Asked with the first of
    them, the model samples the second. None if the printed text does not continue the prompt's.
    """
    shared = _shared_length(prompt_ids, printed_ids)
    asked, printed = (renderer.tokenizer.decode(ids[shared:]) for ids in (prompt_ids, printed_ids))
    return renderer.tokenizer.encode_run(printed[len(asked) :]).ids if printed.startswith(asked) else None


def _shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = min(len(first), len(second))
    differ = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(differ[0]) if len(differ) else length


def _check_reads_back(
    renderer: TemplateRenderer,
    message: Mapping[str, Any],
    index: int,
    prompt_ids: Sequence[int],
    words: Sequence[int],
    tools: Tools | None,
) -> None:
    """A template may print history without what the prompt began (`<think>`): the words then mean something else."""
    parsed = renderer.parse_response(words, tools=tools, prompt_ids=prompt_ids)
    if not parsed.reasoning_complete:
        tail = renderer.tokenizer.decode(prompt_ids[-4:])
        raise UnreachableTurnError(index, f"the prompt ends with {tail!r}, and the printed turn never ends reasoning")
    (checked,) = check_messages([message])
    if not _is_said_by(parsed.content.strip(), checked):
        raise UnreachableTurnError(index, f"behind its prompt the printed turn reads {_shortened(parsed.content)!r}")


def _is_said_by(content: str, message: Mapping[str, Any]) -> bool:
    """Whether content that was read off tokens is that of the checked message, but for white space around it."""
    given = message.get("content") or ""
    # A template that reads strings is shown several texts with a line break between them.
    texts = [given] if isinstance(given, str) else [part["text"] for part in given if part.get("text")]
    return any(_says(content, separator.join(texts).strip(), message) for separator in ("", "\n"))


def _says(content: str, said: str, message: Mapping[str, Any]) -> bool:
    """Whether the words `said` and the checked message's reasoning and calls make this content."""
    thought = message.get("reasoning_content", "").strip()
    if thought and thought in content and thought not in said:
        return False
    if message.get("tool_calls"):  # in a syntax that the format may not know; calls follow the content
        return content.startswith(said)
    # Reasoning that the message spells in its content is read as reasoning.
    return content == said or (content != "" and said.endswith(content))


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def sampled_runs(rendered: RenderedTokens, index: int) -> list[TokenRange]:
    """The token ranges that the model would have sampled of message `index`."""
    runs: list[TokenRange] = []
    for span in rendered.spans:
        if span.sampled and span.message_index == index:
            start = runs.pop()[0] if runs and runs[-1][1] == span.start else span.start
            runs.append((start, span.end))
    return runs


# Stop tokens that the template leaves to the next message.


def with_final_stop(
    renderer: Renderer, rendered: RenderedTokens, messages: Messages, turn: int, tools: Tools | None
) -> RenderedTokens:
    """The same tokens up to the end of `turn`, which they end with, and its stop token if the template prints none."""
    runs = sampled_runs(rendered, turn)
    stops = renderer.get_stop_token_ids()
    if not runs or rendered.token_ids[runs[-1][1] - 1] in stops:
        return rendered
    end = runs[-1][1]
    stop = _stop_behind(renderer, messages, turn, tools, stops)
    return replace(
        rendered,
        token_ids=[*rendered.token_ids[:end], stop],
        spans=(
            *(span for span in rendered.spans if span.end <= end),
            TokenSpan(end, end + 1, turn, sampled=True, content=True),
        ),
    )


def _stop_behind(renderer: Renderer, messages: Messages, turn: int, tools: Tools | None, stops: Sequence[int]) -> int:
    """The stop token that shows once a message follows; the canonical one if the template shows none.

    GLM ends a turn with the next role's token, so a turn that calls a tool ends with another one than an answer.
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
    shown = followed.token_ids[runs[-1][1] - 1] if runs else stops[0]
    return shown if shown in stops else stops[0]


def placed_media(rendered: RenderedTokens) -> list[tuple[MediaItem, PlaceholderRange]]:
    return [] if rendered.multi_modal_data is None else rendered.multi_modal_data.items_with_ranges()
