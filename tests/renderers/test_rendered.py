"""What a rendering knows of its tokens: owners, roles, masks, tools, also where messages are not in one piece."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import corpus
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import RenderedTokens, TemplateRenderer, TokenSpan
from renderers.errors import MessageError
from renderers.messages import ROLES, message_tool_names

# system in two pieces with the user between them; message 2 prints nothing; tokens 9 and 10 belong to nobody.
SCATTERED = RenderedTokens(
    list(range(100, 111)),
    (
        TokenSpan(0, 1, 0, False, False),
        TokenSpan(1, 3, 0, False, True),
        TokenSpan(3, 4, 1, False, True),
        TokenSpan(4, 6, 0, False, True),
        TokenSpan(6, 7, 3, False, False),
        TokenSpan(7, 9, 3, True, True),
        TokenSpan(9, 11, -1, False, False),
    ),
    ["system", "user", "developer", "assistant"],
)


@st.composite
def renderings(draw: st.DrawFn) -> RenderedTokens:
    """Any partition of any tokens, owners in any order."""
    roles = draw(st.lists(st.sampled_from(ROLES), max_size=4))
    kinds = st.tuples(st.integers(1, 4), st.integers(-1, len(roles) - 1), st.booleans(), st.booleans())
    drawn = draw(st.lists(kinds, max_size=10))
    edges = pairwise(accumulate((length for length, *_ in drawn), initial=0))
    spans = [TokenSpan(start, end, *kind) for (start, end), (_, *kind) in zip(edges, drawn, strict=True)]
    return RenderedTokens(list(range(spans[-1].end if spans else 0)), tuple(spans), roles)


def columns(rendered: RenderedTokens) -> list[tuple[int, str | None, bool, bool]]:
    """Owner, role, sampled, content: token by token, the slow way."""
    rows = []
    for position in range(len(rendered)):
        (span,) = (s for s in rendered.spans if s.start <= position < s.end)
        role = rendered.message_roles[span.message_index] if span.message_index >= 0 else None
        rows.append((span.message_index, role, span.sampled, span.content))
    return rows


@given(renderings(), st.sets(st.sampled_from(ROLES)))
def test_masks_agree_with_the_spans(rendered: RenderedTokens, roles: set[str]) -> None:
    rows = columns(rendered)
    assert rendered.message_indices == [owner for owner, *_ in rows]
    assert rendered.sampled_mask == [sampled for *_, sampled, _ in rows]
    assert rendered.is_content == [content for *_, content in rows]
    assert rendered.content_mask_for_roles(roles) == [content and role in roles for _, role, _, content in rows]


@given(renderings())
def test_counts_agree_with_the_columns(rendered: RenderedTokens) -> None:
    rows = columns(rendered)
    messages = range(len(rendered.message_roles))
    assert rendered.tokens_per_message() == [sum(owner == index for owner, *_ in rows) for index in messages]
    assert rendered.tokens_per_message(sampled_only=True) == [
        sum(owner == index and sampled for owner, _, sampled, _ in rows) for index in messages
    ]
    for sampled_only in (False, True):
        by_role = rendered.tokens_by_role(sampled_only=sampled_only)
        assert set(by_role) == set(rendered.message_roles)
        for role, count in by_role.items():
            assert count == sum(r == role and (sampled or not sampled_only) for _, r, sampled, _ in rows)


@given(renderings())
def test_ranges_cover_each_message_exactly_and_are_as_long_as_they_can_be(rendered: RenderedTokens) -> None:
    rows = columns(rendered)
    for index, runs in enumerate(rendered.message_token_runs()):
        covered = [position for start, end in runs for position in range(start, end)]
        assert covered == [position for position, (owner, *_) in enumerate(rows) if owner == index]
        assert all(end < start for (_, end), (start, _) in pairwise(runs))
        hull = rendered.message_token_spans()[index]
        assert hull == ((covered[0], covered[-1] + 1) if covered else None)


@given(renderings())
def test_ranges_by_role_never_cross_a_message(rendered: RenderedTokens) -> None:
    rows = columns(rendered)
    for body, by_role in ((False, rendered.role_token_spans()), (True, rendered.content_token_spans_by_role())):
        assert set(by_role) == set(rendered.message_roles)
        for role, runs in by_role.items():
            covered = sorted(position for start, end in runs for position in range(start, end))
            assert covered == [p for p, (_, r, _, content) in enumerate(rows) if r == role and (content or not body)]
            assert all(len({rows[position][0] for position in range(*run)}) == 1 for run in runs)


def test_a_message_in_two_pieces_has_two_ranges() -> None:
    assert SCATTERED.message_token_runs() == [[(0, 3), (4, 6)], [(3, 4)], [], [(6, 9)]]
    assert SCATTERED.message_token_spans() == [(0, 6), (3, 4), None, (6, 9)]
    assert SCATTERED.tokens_per_message() == [5, 1, 0, 3]
    assert SCATTERED.tokens_per_message(2) == [5, 1]
    assert SCATTERED.tokens_per_message(sampled_only=True) == [0, 0, 0, 2]
    assert SCATTERED.role_token_spans()["system"] == [(0, 3), (4, 6)]
    assert SCATTERED.content_token_spans_by_role() == {
        "system": [(1, 3), (4, 6)],
        "user": [(3, 4)],
        "developer": [],
        "assistant": [(7, 9)],
    }
    body = [False, True, True, False, True, True, False, False, False, False, False]
    assert SCATTERED.content_mask_for_roles({"system"}) == body


def test_masks_of_no_role_and_of_an_absent_role_are_all_false() -> None:
    assert not any(SCATTERED.content_mask_for_roles(set()))
    assert not any(SCATTERED.content_mask_for_roles({"tool"}))


def test_an_unknown_role_is_an_error_and_not_an_empty_mask() -> None:
    with pytest.raises(MessageError, match="'asistant'"):
        SCATTERED.content_mask_for_roles({"asistant"})


# Whose answer a tool message is.


def calls(*named: tuple[str, str]) -> dict[str, Any]:
    return corpus.says("", None, [corpus.call(name, {}, id) for id, name in named])


def test_tool_results_get_their_names_by_id_and_never_by_position() -> None:
    messages = [calls(("a", "first"), ("b", "second")), corpus.answer("x", "b"), corpus.answer("y", "a")]
    assert message_tool_names(messages) == [None, "second", "first"]


def test_a_repeated_id_means_the_call_of_the_nearest_earlier_turn() -> None:
    messages = [
        calls(("a", "first"), ("c", "third")),
        corpus.answer("x", "a"),
        calls(("a", "second")),
        corpus.answer("y", "a"),
        corpus.answer("z", "c"),
        calls(("a", "later")),
    ]
    assert message_tool_names(messages) == [None, "first", None, "second", "third", None]


def test_the_name_of_a_tool_message_overrides_that_of_the_call() -> None:
    messages = [calls(("a", "first")), corpus.answer("x", "a", name="own")]
    assert message_tool_names(messages) == [None, "own"]


def test_the_result_of_an_unknown_call_has_no_name() -> None:
    messages = [
        corpus.user("x"),
        corpus.answer("x", "a"),
        {"role": "tool", "content": "x"},
        calls(("a", "first")),
        {"role": "tool", "content": "x"},
    ]
    assert message_tool_names(messages) == [None] * 5


def test_only_tool_messages_have_a_tool_name() -> None:
    assert message_tool_names([{"role": "user", "name": "Ada", "content": "x"}]) == [None]


def test_a_rendering_names_the_tool_of_each_tool_message(renderer: TemplateRenderer) -> None:
    messages, tools = corpus.CONVERSATIONS["parallel calls, answers swapped"]
    rendered = renderer.render(messages, tools=tools)
    assert rendered.message_tool_names == [None, None, "run", "get_weather", None]


def test_a_bridge_names_the_tools_that_its_history_called(renderer: TemplateRenderer) -> None:
    messages, tools = corpus.CONVERSATIONS["parallel calls, answers swapped"]
    prompt = renderer.render(messages[:1], tools=tools, add_generation_prompt=True)
    whole = renderer.render(messages[:2], tools=tools)
    completion = [t for t, sampled in zip(whole.token_ids, whole.sampled_mask, strict=True) if sampled]
    bridged = renderer.bridge_to_next_turn(
        prompt.token_ids,
        completion,
        messages[2:4],
        tools=tools,
        previous_messages=messages[:2],
        previous_multi_modal_data=prompt.multi_modal_data,
    )
    assert bridged is not None
    assert bridged.message_roles == ["tool", "tool"]
    assert bridged.message_tool_names == ["run", "get_weather"]
