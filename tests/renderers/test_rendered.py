"""What a rendering knows of its tokens: owners, roles, masks, tools, also where messages are not in one piece."""

from itertools import accumulate, pairwise
from typing import Any

import corpus
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import RenderedTokens, TokenSpan
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


def test_an_unknown_role_is_an_error_and_not_an_empty_mask() -> None:
    with pytest.raises(MessageError, match="'asistant'"):
        SCATTERED.content_mask_for_roles({"asistant"})


# Whose answer a tool message is.


def calls(*named: tuple[str, str]) -> dict[str, Any]:
    return corpus.says("", None, [corpus.call(name, {}, id) for id, name in named])


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
