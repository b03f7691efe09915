"""The result of rendering: token ids, the message that owns each of them, and the media of the placeholder tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from renderers.errors import MessageError, RendererError, short_repr
from renderers.media.item import MediaItem
from renderers.messages import ROLES
from renderers.vision.processor import ProcessorOutput

T = TypeVar("T")

#: The number that stands for a modality in `mm_token_type_ids`, as in transformers.
TOKEN_TYPE_IDS: Mapping[str, int] = {"image": 1, "video": 2, "audio": 3}


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """The position of the tokens that replace one media marker: `token_ids[offset : offset + length]`.

    `embed_runs` are the half-open runs of tokens, counted from `offset`, that stand for the item's features;
    None means all of them. The others are text: the time stamps of a video, the row numbers of image tiles.
    `whole` is False where text at an edge of the replacement merges with the text beside it into one token,
    which the range leaves out.
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
        if self.embed_runs is None:
            return self.length
        return sum(end - start for start, end in self.runs)

    @property
    def is_embed(self) -> np.ndarray | None:
        """Bool (length,), True on feature tokens; None where all are, as in vLLM's `PlaceholderRange`."""
        if self.embed_runs is None:
            return None
        mask = np.zeros(self.length, dtype=bool)
        for start, end in self.embed_runs:
            mask[start:end] = True
        return mask

    def runs_of(self, item: MediaItem) -> list[tuple[str, int, int]]:
        """(modality, start, end) of the runs of feature tokens, in tokens of the prompt: those of a sound
        inside of a video are of the modality audio. The item must have as many feature tokens as the
        range."""
        if not item.has_sound:
            return [(item.modality, start, end) for start, end in self.runs]
        runs: list[tuple[str, int, int]] = []
        left = list(self.runs)[::-1]
        for modality, count in item.feature_counts:
            while count:
                start, end = left.pop()
                taken = min(count, end - start)
                runs.append((modality, start, start + taken))
                count -= taken
                if start + taken < end:
                    left.append((start + taken, end))
        return runs

    def shifted(self, by: int) -> PlaceholderRange:
        return PlaceholderRange(self.offset + by, self.length, self.embed_runs, self.whole)


@dataclass(frozen=True)
class MultiModalData:
    """The media of a prompt: per modality three parallel lists, in prompt order.

    `mm_items` are mappings from tensor name to array, as a transformers processor returns them. Those of a
    renderer are `ProcessorOutput`s; `media_items` gives the `MediaItem`s that they are made of. Pydantic
    models may have a field of this type: it is validated from an instance or from a dict of the three lists.
    """

    mm_hashes: dict[str, list[str]] = field(default_factory=dict)
    mm_placeholders: dict[str, list[PlaceholderRange]] = field(default_factory=dict)
    mm_items: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)

    @classmethod
    def from_items(cls, items: Iterable[tuple[MediaItem, PlaceholderRange]]) -> MultiModalData:
        """Collect items with their ranges; each modality keeps their order."""
        data = cls({}, {}, {})
        for item, placeholder in items:
            data._append(item, placeholder)
        return data

    @property
    def media_items(self) -> dict[str, list[MediaItem]]:
        """The `MediaItem`s by modality, in order. Raises `RendererError` for an item made elsewhere."""
        return {modality: list(map(_media_item, entries)) for modality, entries in self.mm_items.items()}

    def items_with_ranges(self) -> list[tuple[MediaItem, PlaceholderRange]]:
        """Every item with its range, over all modalities, in prompt order."""
        if not self.mm_placeholders:
            return []
        pairs = [
            (_media_item(entry), placeholder)
            for modality, ranges in self.mm_placeholders.items()
            for entry, placeholder in zip(self.mm_items[modality], ranges, strict=True)
        ]
        return sorted(pairs, key=lambda pair: pair[1].offset)

    def with_items(self, items: Iterable[tuple[MediaItem, PlaceholderRange]]) -> MultiModalData:
        """These items, then the given ones, in prompt order."""
        joined = MultiModalData(
            {modality: list(hashes) for modality, hashes in self.mm_hashes.items()},
            {modality: list(ranges) for modality, ranges in self.mm_placeholders.items()},
            {
                modality: [ProcessorOutput(_media_item(item)) for item in items]
                for modality, items in self.mm_items.items()
            },
        )
        for item, placeholder in items:
            joined._append(item, placeholder)
        return joined

    def _append(self, item: MediaItem, placeholder: PlaceholderRange) -> None:
        self.mm_hashes.setdefault(item.modality, []).append(item.mm_hash)
        self.mm_placeholders.setdefault(item.modality, []).append(placeholder)
        self.mm_items.setdefault(item.modality, []).append(ProcessorOutput(item))

    def is_empty(self) -> bool:
        return not any(self.mm_items.values())

    def __len__(self) -> int:
        return sum(len(items) for items in self.mm_items.values())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        serialization = core_schema.plain_serializer_function_ser_schema(cls.model_dump, info_arg=False)
        return core_schema.no_info_plain_validator_function(cls._validated, serialization=serialization)

    @classmethod
    def _validated(cls, value: Any) -> MultiModalData:
        if isinstance(value, cls):
            return value
        columns = ("mm_hashes", "mm_placeholders", "mm_items")
        if not isinstance(value, Mapping) or not value.keys() <= set(columns):
            raise ValueError(f"multi-modal data are a MultiModalData or a dict of {', '.join(columns)}")
        ranges = {
            modality: [PlaceholderRange(**entry) if isinstance(entry, Mapping) else entry for entry in entries]
            for modality, entries in value.get("mm_placeholders", {}).items()
        }
        return cls(dict(value.get("mm_hashes", {})), ranges, dict(value.get("mm_items", {})))

    def model_dump(self) -> dict[str, Any]:
        """The three columns as dicts and lists, tensors as arrays; pydantic's encoders look for this name."""
        ranges = {
            modality: [{"offset": entry.offset, "length": entry.length} for entry in entries]
            for modality, entries in self.mm_placeholders.items()
        }
        items = {modality: [dict(entry) for entry in entries] for modality, entries in self.mm_items.items()}
        return {"mm_hashes": self.mm_hashes, "mm_placeholders": ranges, "mm_items": items}


def _media_item(entry: Mapping[str, Any]) -> MediaItem:
    if isinstance(entry, ProcessorOutput):
        return entry.item
    if isinstance(entry, MediaItem):
        return entry
    raise RendererError(
        f"an entry of mm_items is a {type(entry).__name__}, not an item that a renderer made: its pixels, "
        "source and placeholder tokens are unknown. Render the messages with this package."
    )


class TokenSpan(NamedTuple):
    """Tokens `start:end` have equal attribution. `message_index` is -1 for scaffold without a message."""

    start: int
    end: int
    message_index: int
    sampled: bool
    content: bool

    def moved(self, by: int) -> TokenSpan:
        """The span of the same tokens `by` tokens later."""
        start, end, message_index, sampled, content = self
        # Without a call of `TokenSpan`, which takes twice as long: each bridge moves several spans.
        return tuple.__new__(TokenSpan, (start + by, end + by, message_index, sampled, content))


class UnprintedField(NamedTuple):
    """A field of message `message_index` (`content`, `content[1]`, `tool_calls`) of which the template prints nothing.

    `reason` says so and has the cure.
    """

    message_index: int
    field: str
    reason: str


def _column(of_span: Callable[[TokenSpan], T], default: T) -> Any:
    """A per-token column, made when first read: the value of the token's span, `default` without one."""
    return cached_property(lambda rendered: rendered._column(of_span, default))


@dataclass(frozen=True, init=False)
class RenderedTokens:
    """A rendered conversation.

    `token_ids` is a plain list of ints: it goes into JSON and is compared with `==`. It is expanded: an image
    has all its placeholder tokens. `placeholder_token_ids` maps each modality to the token that the template
    prints for an item; it is the only token of an item in `logical_ids`. Attribution is stored as `spans`
    that partition the tokens; three columns have one entry per token and are built when first read:
    `message_indices` is the index of the message that owns the token (-1: scaffold without a message),
    `sampled_mask` whether the model would have sampled it, `is_content` whether it is message body and not
    scaffold. `message_roles` and `message_tool_names` have one entry per message; the latter is the name of
    the tool whose result a tool message holds, None elsewhere. `unprinted` lists the contents and tool calls
    that the model does not see, because the template prints nothing of them.

    Most templates print each message in one piece, in the order of the conversation, but a template may also
    move the tool list into a later message or sort tool results. Where a message owns several separate
    pieces, `message_token_spans` gives the range from the first to the last of them, which covers tokens of
    other messages; all other methods treat the pieces separately.
    """

    token_ids: list[int]
    spans: tuple[TokenSpan, ...]
    message_roles: list[str]
    multi_modal_data: MultiModalData | None
    message_tool_names: list[str | None]
    placeholder_token_ids: Mapping[str, int]
    unprinted: tuple[UnprintedField, ...] = field(repr=False, compare=False)

    message_indices: list[int] = field(
        default=_column(lambda span: span.message_index, -1), init=False, repr=False, compare=False
    )
    sampled_mask: list[bool] = field(
        default=_column(lambda span: span.sampled, False), init=False, repr=False, compare=False
    )
    is_content: list[bool] = field(
        default=_column(lambda span: span.content, False), init=False, repr=False, compare=False
    )

    def __init__(
        self,
        token_ids: list[int] | None = None,
        spans: tuple[TokenSpan, ...] = (),
        message_roles: list[str] | None = None,
        multi_modal_data: MultiModalData | None = None,
        *,
        message_tool_names: list[str | None] | None = None,
        placeholder_token_ids: Mapping[str, int] | None = None,
        unprinted: tuple[UnprintedField, ...] = (),
        message_indices: Sequence[int] = (),
        sampled_mask: Sequence[bool] = (),
        is_content: Sequence[bool] = (),
    ) -> None:
        """Attribution is given as `spans`, or as columns of equal length; an absent column is -1 or False.

        Raises `ValueError` for columns of different lengths, and for one as long as the tokens are not.
        Without `message_roles`, there are as many messages as `message_indices` names, all with an empty
        role.
        """
        if message_indices or sampled_mask or is_content:
            columns = {"message_indices": message_indices, "sampled_mask": sampled_mask, "is_content": is_content}
            length = len(token_ids or message_indices)
            for name, column in columns.items():
                if column and len(column) != length:
                    found = f"{name} has {len(column)} entries for {length} tokens"
                    raise ValueError(f"{found}; give one per token, or leave it out")
            spans = _spans_of(length, message_indices, sampled_mask, is_content)
            message_roles = message_roles or [""] * (max(message_indices, default=-1) + 1)
        values = self.__dict__
        values["token_ids"] = [] if token_ids is None else token_ids
        values["spans"] = spans
        values["message_roles"] = [] if message_roles is None else message_roles
        values["multi_modal_data"] = multi_modal_data
        values["message_tool_names"] = [] if message_tool_names is None else message_tool_names
        values["placeholder_token_ids"] = {} if placeholder_token_ids is None else placeholder_token_ids
        values["unprinted"] = unprinted

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """A field of a pydantic model: read from an instance or a dict of columns, written as such a dict."""
        from pydantic_core import core_schema as schema

        ids, flags = schema.list_schema(schema.int_schema()), schema.list_schema(schema.bool_schema())
        types = {
            "token_ids": ids,
            "message_indices": ids,
            "sampled_mask": flags,
            "is_content": flags,
            "message_roles": schema.list_schema(schema.str_schema()),
            "message_tool_names": schema.list_schema(schema.nullable_schema(schema.str_schema())),
            "multi_modal_data": schema.nullable_schema(handler.generate_schema(MultiModalData)),
            "placeholder_token_ids": schema.dict_schema(schema.str_schema(), schema.int_schema()),
        }
        fields = {name: schema.typed_dict_field(of_column, required=False) for name, of_column in types.items()}
        columns = schema.typed_dict_schema(fields, extra_behavior="forbid")

        def plain(rendered: RenderedTokens) -> dict[str, Any]:
            return {name: getattr(rendered, name) for name in types}

        return schema.union_schema(
            [
                schema.is_instance_schema(cls),
                schema.no_info_after_validator_function(lambda given: cls(**given), columns),
            ],
            serialization=schema.plain_serializer_function_ser_schema(plain, return_schema=columns),
        )

    # Per token.

    @cached_property
    def mm_token_type_ids(self) -> list[int]:
        """Per token, 1 where it stands for features of an image, 2 of a video, 3 of a sound, else 0.

        Read off the ranges, not the ids: a sampled placeholder token is text.
        """
        types = [0] * len(self.token_ids)
        for modality, ranges in self._placeholders().items():
            entries = self.multi_modal_data.mm_items.get(modality, ()) if self.multi_modal_data else ()
            for placeholder, entry in itertools.zip_longest(ranges, entries):
                runs = [(modality, *run) for run in placeholder.runs]
                if isinstance(entry, ProcessorOutput):
                    runs = placeholder.runs_of(entry.item)
                for kind, start, end in runs:
                    types[start:end] = [TOKEN_TYPE_IDS[kind]] * (end - start)
        return types

    # Logical ids: the input of a server that expands media itself.

    @cached_property
    def logical_ids(self) -> list[int]:
        """The token ids with a single marker in place of each item. Raises `RendererError` where unknown."""
        logical: list[int] = []
        position = 0
        for modality, placeholder in self._media_ranges():
            logical += self.token_ids[position : placeholder.offset]
            logical.append(self.placeholder_token_ids[modality])
            position = placeholder.end
        return logical + self.token_ids[position:]

    @cached_property
    def expanded_positions(self) -> np.ndarray:
        """int64 (number of logical ids + 1,): where each logical token begins in `token_ids`; then the end."""
        lengths = np.ones(len(self.logical_ids), dtype=np.int64)
        removed = 0
        for _, placeholder in self._media_ranges():
            lengths[placeholder.offset - removed] = placeholder.length
            removed += placeholder.length - 1
        return np.concatenate([[0], np.cumsum(lengths)])

    def _media_ranges(self) -> list[tuple[str, PlaceholderRange]]:
        pairs = [(modality, each) for modality, ranges in self._placeholders().items() for each in ranges]
        if not all(placeholder.whole for _, placeholder in pairs):
            raise RendererError(
                "text that the processor puts around an image merges with the text beside it into one token, "
                "so the ids without the expansion cannot be computed from those with it; send the features "
                "instead of raw media"
            )
        return sorted(pairs, key=lambda pair: pair[1].offset)

    def _placeholders(self) -> Mapping[str, list[PlaceholderRange]]:
        return {} if self.multi_modal_data is None else self.multi_modal_data.mm_placeholders

    def content_mask_for_roles(self, roles: Collection[str]) -> list[bool]:
        """Per token, whether it is the body of a message of one of these roles. Raises `MessageError`."""
        names = check_roles(roles)
        return self._column(lambda span: span.content and self._role_of(span) in names, False)

    # Per message.

    def tokens_per_message(self, n_messages: int | None = None, *, sampled_only: bool = False) -> list[int]:
        """How many tokens each message owns, with its scaffold; only the first `n_messages` if given.

        `sampled_only` counts only tokens that the model would have sampled, for example for a length penalty.
        """
        counts = [0] * len(self.message_roles)
        for span in self._owned():
            if span.sampled or not sampled_only:
                counts[span.message_index] += span.end - span.start
        return counts[:n_messages]

    def message_token_spans(self) -> list[tuple[int, int] | None]:
        """Per message, the half-open range from its first to its last token; None if nothing was printed."""
        return [(runs[0][0], runs[-1][1]) if runs else None for runs in self.message_token_runs()]

    def message_token_runs(self) -> list[list[tuple[int, int]]]:
        """Per message, the half-open ranges that it owns, ascending: one unless the template moves text."""
        return self._runs(self._owned())

    # Per role.

    def tokens_by_role(self, *, sampled_only: bool = False) -> dict[str, int]:
        """`tokens_per_message` added up by role; every role of the conversation has an entry."""
        counts = dict.fromkeys(self.message_roles, 0)
        for role, count in zip(self.message_roles, self.tokens_per_message(sampled_only=sampled_only), strict=True):
            counts[role] += count
        return counts

    def role_token_spans(self) -> dict[str, list[tuple[int, int]]]:
        """Role -> the token ranges of its messages, in the order of the messages."""
        return self._runs_by_role(self.message_token_runs())

    def content_token_spans_by_role(self) -> dict[str, list[tuple[int, int]]]:
        """Role -> the token ranges of its message bodies, in the order of the messages."""
        return self._runs_by_role(self._runs(span for span in self._owned() if span.content))

    def __len__(self) -> int:
        return len(self.token_ids)

    def _owned(self) -> Iterator[TokenSpan]:
        return (span for span in self.spans if 0 <= span.message_index < len(self.message_roles))

    def _role_of(self, span: TokenSpan) -> str | None:
        return self.message_roles[span.message_index] if 0 <= span.message_index < len(self.message_roles) else None

    def _runs(self, spans: Iterable[TokenSpan]) -> list[list[tuple[int, int]]]:
        """Per message, its spans as ranges, adjacent ones merged."""
        runs: list[list[tuple[int, int]]] = [[] for _ in self.message_roles]
        for span in spans:
            runs[span.message_index].append((span.start, span.end))
        return [merge_adjacent(each) for each in runs]

    def _runs_by_role(self, runs: Sequence[list[tuple[int, int]]]) -> dict[str, list[tuple[int, int]]]:
        by_role: dict[str, list[tuple[int, int]]] = {role: [] for role in self.message_roles}
        for role, of_message in zip(self.message_roles, runs, strict=True):
            by_role[role] += of_message
        return by_role

    def _column(self, value: Callable[[TokenSpan], T], default: T) -> list[T]:
        column = [default] * (len(self.token_ids) or max((span.end for span in self.spans), default=0))
        for span in self.spans:
            column[span.start : span.end] = [value(span)] * (span.end - span.start)
        return column


def _spans_of(
    length: int, message_indices: Sequence[int], sampled_mask: Sequence[bool], is_content: Sequence[bool]
) -> tuple[TokenSpan, ...]:
    """The spans of three columns of this length; an empty column is -1 or False."""
    indices = np.asarray(message_indices, dtype=np.int64) if message_indices else np.full(length, -1)
    sampled, content = (
        np.asarray(column, dtype=bool) if column else np.zeros(length, dtype=bool)
        for column in (sampled_mask, is_content)
    )
    changes = np.diff(indices).astype(bool) | (np.diff(sampled) | np.diff(content))
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), length]
    return tuple(
        TokenSpan(start, end, int(indices[start]), bool(sampled[start]), bool(content[start]))
        for start, end in itertools.pairwise(edges)
    )


def merge_adjacent(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending half-open ranges, with those merged that touch."""
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def check_roles(roles: Collection[str]) -> frozenset[str]:
    """The roles, or a single role, as a set. Raises `MessageError` for a name that is not a role."""
    names = frozenset((roles,) if isinstance(roles, str) else roles)
    if unknown := sorted(names.difference(ROLES)):
        raise MessageError(f"unknown role {short_repr(unknown[0])}; a role is one of {', '.join(ROLES)}")
    return names
