"""An assistant turn as the model would have sampled it: the prompt before it, then its tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from renderers.errors import TemplateError, short_repr, unreachable_turn
from renderers.media.item import MediaItem
from renderers.messages import NOUNS, check_messages
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.response import ParsedResponse, ToolCallParseStatus
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
        raise unreachable_turn(
            index, f"the template refuses to print the prompt before it ({error.template_message})"
        ) from error
    check_are_printed(renderer, messages[: index + 1], [index], tools, printed)
    runs = sampled_runs(printed, index)
    if not runs:
        return None
    if len(runs) > 1:
        raise unreachable_turn(index, f"the template prints it in {len(runs)} separate pieces")
    start, end = runs[0]
    for item, placeholder in media_with_ranges(printed):
        if start <= placeholder.offset < end:
            raise unreachable_turn(index, f"it shows {NOUNS[item.modality]}")
    continuation = _continuation(renderer, prompt.token_ids, printed.token_ids[:end], start)
    turn_ids = printed.token_ids[start:end] if continuation is None else continuation
    _check_reasoning_markers(renderer, index, prompt.token_ids, turn_ids)
    if continuation is None:
        parsed = renderer.parse_response(turn_ids, tools=tools, prompt_ids=prompt.token_ids)
        _check_parses_back(renderer.format, messages[index], index, parsed)
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


def _continuation(
    renderer: TemplateRenderer, prompt_ids: Sequence[int], printed_ids: Sequence[int], start: int
) -> list[int] | None:
    """The ids with which the printed ids continue the prompt; None if they do not begin with its text.

    Where `<think>\\n` and `\\n</think>` are printed together, the two line breaks are one token. After a
    prompt that ends with the first line break, the model samples the second as a separate token. None, too,
    if the template prints a header that the prompt lacks; `start` is where the sampled tokens begin in the
    printed ones.
    """
    decode = renderer.tokenizer.decode
    shared = taken = _shared_length(prompt_ids, printed_ids)
    rest, covered = decode(prompt_ids[shared:]), ""
    while not covered.startswith(rest):
        if taken == len(printed_ids) or not rest.startswith(covered):
            return None
        taken += 1
        covered = decode(printed_ids[shared:taken])
    header = decode(printed_ids[taken:start]).lstrip()
    if header and not header.startswith(renderer.format.sampled_markers):
        return None
    return [*renderer.tokenizer.encode_run(covered[len(rest) :]).ids, *printed_ids[taken:]]


def _shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = min(len(first), len(second))
    differ = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(differ[0]) if len(differ) else length


# Turns that are not what the model would sample.


def check_are_printed(
    renderer: Renderer, messages: Messages, turns: Collection[int], tools: Tools | None, printed: RenderedTokens
) -> None:
    """Raise `MessageError` if content, calls or reasoning of some turns are missing in a print of `messages`.

    Whether reasoning is printed is found by printing all messages once more with other words as the reasoning
    of these turns. Templates drop that before the last message of a user by design.
    """
    dropped = {lost.message_index: lost.field for lost in printed.unprinted if lost.message_index in turns}
    question = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
    if isinstance(renderer, TemplateRenderer):
        words = {index: f"Other words {index}." for index in turns if index > question}
        others = {at: _with_reasoning(messages[at], words[at], renderer.format.reasoning) for at in words}
        if given := [index for index, other in others.items() if other is not None]:
            changed = [others.get(index) or message for index, message in enumerate(messages)]
            text = renderer.tokenizer.decode(renderer.render_ids(changed, tools=tools))
            dropped = {index: "reasoning" for index in given if words[index] not in text} | dropped
    if dropped:
        index = min(dropped)
        raise unreachable_turn(
            index,
            f"the template prints nothing of its {dropped[index]}, so that the model would learn to answer without",
            cure="remove that from the message, or load the renderer with a chat_template= that prints it",
        )


def _with_reasoning(message: Mapping[str, Any], words: str, markers: ReasoningMarkers | None) -> dict[str, Any] | None:
    """The message with these words in place of its reasoning, in its content too; None without any."""
    (checked,) = check_messages([message])
    if checked.get("reasoning_content", "").strip():
        return {**checked, "reasoning_content": words, "thinking": words}
    thought, _ = _split(_text(checked), markers)
    return {**checked, "content": _text(checked).replace(thought, words, 1)} if thought else None


def _text(message: Mapping[str, Any], separator: str = "\n") -> str:
    """The text of a checked message; a template that reads strings gets parts joined by line breaks."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else separator.join(part["text"] for part in content if part.get("text"))


def _split(text: str, markers: ReasoningMarkers | None) -> tuple[str, str]:
    """The reasoning inside of a content, maybe empty, and the rest, both stripped."""
    if markers is None or markers.end not in text:
        return "", text.strip()
    thought, _, answer = text.partition(markers.end)
    return thought.rpartition(markers.start)[2].removeprefix(markers.label).strip(), answer.strip()


def _check_reasoning_markers(
    renderer: TemplateRenderer, index: int, prompt_ids: Sequence[int], turn_ids: Sequence[int]
) -> None:
    """Raise `MessageError` if the turn does not end reasoning that its prompt began, or begins it again."""
    markers = renderer.format.reasoning
    if markers is None:
        return
    prompt, turn = renderer.tokenizer.decode(prompt_ids), renderer.tokenizer.decode(turn_ids)
    is_open = not renderer.parse_response([], prompt_ids=prompt_ids).reasoning_complete
    if is_open and markers.end not in turn:
        cure = f"give its reasoning as reasoning_content or, ended with {markers.end}, in the content: as it is printed"
        reason = f"the prompt ends with {prompt[-60:]!r}, and the printed turn never ends reasoning"
        raise unreachable_turn(index, reason, cure=cure)
    if (is_open or prompt.rstrip().endswith(markers.end)) and turn.lstrip().startswith(markers.start):
        raise unreachable_turn(index, f"the prompt ends with {prompt[-60:]!r}, and the printed turn begins reasoning")


def _check_parses_back(format: Format, message: Mapping[str, Any], index: int, parsed: ParsedResponse) -> None:
    """Raise `MessageError` if the turn was parsed as another message: history may lack `<think>`."""
    (checked,) = check_messages([message])
    thoughts, texts = zip(
        *(_split(_text(checked, separator), format.reasoning) for separator in ("\n", "")), strict=True
    )
    thought, content = checked.get("reasoning_content", "").strip() or thoughts[0], parsed.content.strip()
    reads_calls = format.tool_calls is not None or format.channels is not None
    is_content = content in texts or (not reads_calls and "tool_calls" in checked and content.startswith(texts))
    is_thought = format.reasoning is None or (parsed.reasoning_content or "").strip() == thought
    is_canonical = all(call.status is not ToolCallParseStatus.NONCANONICAL for call in parsed.tool_calls)
    if not (is_content and is_thought and is_canonical and parsed.reasoning_complete):
        raise unreachable_turn(
            index, f"after its prompt the printed turn is parsed as {short_repr(parsed.to_message())}"
        )


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
    """The stop token of the turn before another message, which may be its role's; the first if none."""
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
