"""What rendering returns: token ids, who owns each of them, and the media that some of them stand for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from renderers.errors import LogicalIdsError, UnknownRoleError, short_repr
from renderers.media.item import MediaItem
from renderers.messages import ROLES

T = TypeVar("T")

#: How models tell the modality of a token (`mm_token_type_ids` of transformers).
TOKEN_TYPE_IDS: Mapping[str, int] = {"image": 1, "video": 2}


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Where the tokens that replace one media marker sit: `token_ids[offset : offset + length]`.

    `embed_runs` are the half-open runs of tokens, counted from `offset`, that stand for the item's features; None says
    all of them. The others are text: the time stamps of a video, the row numbers of image tiles. `whole` is False
    where text at an edge of what replaced the marker merges with its neighbours into one token, which is then outside.
    """

    offset: int
    length: int
    embed_runs: tuple[tuple[int, int], ...] | None = None
    whole: bool = True

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The half-open runs of feature tokens, in tokens of the prompt."""
        if self.embed_runs is None:
            return ((self.offset, self.end),)
        return tuple((self.offset + start, self.offset + end) for start, end in self.embed_runs)

    @property
    def num_embeds(self) -> int:
        """How many tokens stand for features."""
        return sum(end - start for start, end in self.runs)

    @property
    def is_embed(self) -> np.ndarray | None:
        """Bool of shape (length,), True on feature tokens; None where all are, as in vLLM's `PlaceholderRange`."""
        if self.embed_runs is None:
            return None
        mask = np.zeros(self.length, dtype=bool)
        for start, end in self.embed_runs:
            mask[start:end] = True
        return mask

    def shifted(self, by: int) -> PlaceholderRange:
        return replace(self, offset=self.offset + by)


@dataclass(frozen=True)
class MultiModalData:
    """The media of a prompt: per modality three parallel lists, in prompt order."""

    mm_hashes: dict[str, list[str]] = field(default_factory=dict)
    mm_placeholders: dict[str, list[PlaceholderRange]] = field(default_factory=dict)
    mm_items: dict[str, list[MediaItem]] = field(default_factory=dict)

    @classmethod
    def from_items(cls, placed: Iterable[tuple[MediaItem, PlaceholderRange]]) -> MultiModalData:
        """Collect items with their ranges; the order given is kept within each modality."""
        data = cls()
        for item, where in placed:
            data.mm_hashes.setdefault(item.modality, []).append(item.mm_hash)
            data.mm_placeholders.setdefault(item.modality, []).append(where)
            data.mm_items.setdefault(item.modality, []).append(item)
        return data

    def items_with_ranges(self) -> list[tuple[MediaItem, PlaceholderRange]]:
        """Every item with its range, over all modalities, in prompt order."""
        placed = [
            pair
            for modality, ranges in self.mm_placeholders.items()
            for pair in zip(self.mm_items[modality], ranges, strict=True)
        ]
        return sorted(placed, key=lambda pair: pair[1].offset)

    def followed_by(self, later: MultiModalData | None, offset: int) -> MultiModalData:
        """These items at unchanged offsets, then `later`'s, moved right by `offset` tokens."""
        moved = [] if later is None else [(item, where.shifted(offset)) for item, where in later.items_with_ranges()]
        return MultiModalData.from_items([*self.items_with_ranges(), *moved])

    def is_empty(self) -> bool:
        return not any(self.mm_items.values())

    def __len__(self) -> int:
        return sum(len(items) for items in self.mm_items.values())


class TokenSpan(NamedTuple):
    """Tokens `start:end` share one owner and one kind. `message_index` is -1 for scaffold without a message."""

    start: int
    end: int
    message_index: int
    sampled: bool
    content: bool


@dataclass(frozen=True)
class RenderedTokens:
    """A rendered conversation.

    `token_ids` is a plain list of ints: it goes into JSON and is compared with `==`. It is expanded: an image has all
    its placeholder tokens. `placeholder_token_ids` names for each modality the token that the template prints for an
    item; it is the only token of an item in `logical_ids`. Attribution is kept as spans that
    partition the tokens; the per-token columns are built when first read. `message_roles` and `message_tool_names` have
    one entry per message; the latter names the tool that a tool message answers and is None elsewhere.

    Most templates print each message in one piece, in the order of the conversation, but they need not: a template may
    move the tool list into a later message or sort tool results. Everything here holds then too. Where a message owns
    several separate pieces, `message_token_spans` gives the hull, which covers tokens of others; all other methods see
    the pieces.
    """

    token_ids: list[int]
    spans: tuple[TokenSpan, ...] = ()
    message_roles: list[str] = field(default_factory=list)
    multi_modal_data: MultiModalData | None = None
    message_tool_names: list[str | None] = field(default_factory=list, kw_only=True)
    placeholder_token_ids: Mapping[str, int] = field(default_factory=dict, kw_only=True)

    # Per token.

    @cached_property
    def message_indices(self) -> list[int]:
        """Per token, the index of the message that it belongs to; -1 is scaffold without a message."""
        return self._column(lambda span: span.message_index, -1)

    @cached_property
    def sampled_mask(self) -> list[bool]:
        """Per token, whether the model would have sampled it."""
        return self._column(lambda span: span.sampled, False)

    @cached_property
    def is_content(self) -> list[bool]:
        """Per token, whether it is message body and not scaffold."""
        return self._column(lambda span: span.content, False)

    @cached_property
    def mm_token_type_ids(self) -> list[int]:
        """Per token, 1 where it stands for features of an image, 2 for those of a video, else 0; by range, not id."""
        types = [0] * len(self.token_ids)
        for modality, ranges in self._placeholders().items():
            for start, end in itertools.chain.from_iterable(where.runs for where in ranges):
                types[start:end] = [TOKEN_TYPE_IDS[modality]] * (end - start)
        return types

    # Logical ids: as a server takes them that expands media itself.

    @cached_property
    def logical_ids(self) -> list[int]:
        """The token ids with a single marker in place of each item. Raises `LogicalIdsError` where they are unknown."""
        logical: list[int] = []
        position = 0
        for modality, where in self._markers():
            logical += self.token_ids[position : where.offset]
            logical.append(self.placeholder_token_ids[modality])
            position = where.end
        return logical + self.token_ids[position:]

    @cached_property
    def expanded_positions(self) -> np.ndarray:
        """int64 (number of logical ids + 1,): where each logical token begins in `token_ids`, and the last one ends."""
        lengths = np.ones(len(self.logical_ids), dtype=np.int64)
        removed = 0
        for _, where in self._markers():
            lengths[where.offset - removed] = where.length
            removed += where.length - 1
        return np.concatenate([[0], np.cumsum(lengths)])

    @cached_property
    def logical_positions(self) -> np.ndarray:
        """int64 (number of token ids,): for each expanded token, the logical token that it comes from."""
        return np.repeat(np.arange(len(self.logical_ids)), np.diff(self.expanded_positions))

    def _markers(self) -> list[tuple[str, PlaceholderRange]]:
        """(modality, range) of every item in prompt order."""
        placed = [(modality, where) for modality, ranges in self._placeholders().items() for where in ranges]
        if any(not where.whole for _, where in placed):
            raise LogicalIdsError
        return sorted(placed, key=lambda pair: pair[1].offset)

    def _placeholders(self) -> Mapping[str, list[PlaceholderRange]]:
        return {} if self.multi_modal_data is None else self.multi_modal_data.mm_placeholders

    def content_mask_for_roles(self, roles: Collection[str]) -> list[bool]:
        """Per token, whether it is the body of a message of one of these roles. Raises `UnknownRoleError`."""
        wanted = check_roles(roles)
        return self._column(lambda span: span.content and self._role_of(span) in wanted, False)

    def sampled_mask_for_roles(self, roles: Collection[str]) -> list[bool]:
        """Per token, whether the model would have sampled it in a message of one of these roles.

        Raises `UnknownRoleError`.
        """
        wanted = check_roles(roles)
        return self._column(lambda span: span.sampled and self._role_of(span) in wanted, False)

    # Per message.

    def tokens_per_message(self, n_messages: int | None = None, *, sampled_only: bool = False) -> list[int]:
        """How many tokens each message owns, scaffold around it included; of the first `n_messages` if given.

        `sampled_only` counts what the model would have sampled: a length penalty must not count the template's tokens.
        """
        counts = [0] * len(self.message_roles)
        for span in self._owned():
            if span.sampled or not sampled_only:
                counts[span.message_index] += span.end - span.start
        return counts[:n_messages]

    def message_token_spans(self) -> list[tuple[int, int] | None]:
        """Per message, the half-open token range from its first to its last token; None where it printed nothing."""
        return [(runs[0][0], runs[-1][1]) if runs else None for runs in self.message_token_runs()]

    def message_token_runs(self) -> list[list[tuple[int, int]]]:
        """Per message, the half-open token ranges that are its own, ascending: one unless the template moves text."""
        runs: list[list[tuple[int, int]]] = [[] for _ in self.message_roles]
        for span in self._owned():
            _extend(runs[span.message_index], span)
        return runs

    # Per role.

    def tokens_by_role(self, *, sampled_only: bool = False) -> dict[str, int]:
        """`tokens_per_message` added up by role; every role of the conversation has an entry."""
        counts = dict.fromkeys(self.message_roles, 0)
        for role, count in zip(self.message_roles, self.tokens_per_message(sampled_only=sampled_only), strict=True):
            counts[role] += count
        return counts

    def role_token_spans(self) -> dict[str, list[tuple[int, int]]]:
        """Role -> the token ranges of its messages, in the order of the messages; none crosses a message boundary."""
        return self._runs_by_role(self.message_token_runs())

    def content_token_spans_by_role(self) -> dict[str, list[tuple[int, int]]]:
        """Role -> the token ranges of its bodies, in the order of the messages; none crosses a message boundary."""
        runs: list[list[tuple[int, int]]] = [[] for _ in self.message_roles]
        for span in self._owned():
            if span.content:
                _extend(runs[span.message_index], span)
        return self._runs_by_role(runs)

    def __len__(self) -> int:
        return len(self.token_ids)

    def _owned(self) -> Iterator[TokenSpan]:
        """The spans that belong to a message of this rendering."""
        return (span for span in self.spans if 0 <= span.message_index < len(self.message_roles))

    def _role_of(self, span: TokenSpan) -> str | None:
        return self.message_roles[span.message_index] if 0 <= span.message_index < len(self.message_roles) else None

    def _runs_by_role(self, runs: Sequence[list[tuple[int, int]]]) -> dict[str, list[tuple[int, int]]]:
        by_role: dict[str, list[tuple[int, int]]] = {role: [] for role in self.message_roles}
        for role, of_message in zip(self.message_roles, runs, strict=True):
            by_role[role] += of_message
        return by_role

    def _column(self, value: Callable[[TokenSpan], T], default: T) -> list[T]:
        column = [default] * len(self.token_ids)
        for span in self.spans:
            column[span.start : span.end] = [value(span)] * (span.end - span.start)
        return column


def _extend(runs: list[tuple[int, int]], span: TokenSpan) -> None:
    """Add a span to ascending ranges; what touches the last one makes it longer."""
    if runs and runs[-1][1] == span.start:
        runs[-1] = (runs[-1][0], span.end)
    else:
        runs.append((span.start, span.end))


def check_roles(roles: Collection[str]) -> frozenset[str]:
    """The roles, or a single one, as a set; raises `UnknownRoleError` for a name that is no role."""
    names = frozenset((roles,) if isinstance(roles, str) else roles)
    if unknown := sorted(names.difference(ROLES)):
        raise UnknownRoleError(f"unknown role {short_repr(unknown[0])}; a role is one of {', '.join(ROLES)}")
    return names
