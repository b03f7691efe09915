"""Step lists of other libraries, read one by one, each of their media once."""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from renderers.errors import short_repr
from transport.errors import StepMediaError
from transport.interop.inline_tensors import same_value
from transport.wire.registry import wire_type

# Reading the media and token ids of one step of a step list; steps are dicts or objects with attributes.
#
# step["tokens"]["prompt_ids"], ["completion_ids"], ["multi_modal_data"]
# step["response"].message.tokens.multi_modal_data


MEDIA_KEY: Final = "multi_modal_data"
COLUMNS: Final = ("mm_hashes", "mm_placeholders", "mm_items")
TOKENS_PATHS: Final = (("tokens",), ("response", "message", "tokens"))
ON_STEP, ON_RESPONSE = range(2)  # the positions in TOKENS_PATHS

# Keys under which other programs keep media. If these were ignored, the media would be sent in full or be lost.
_WRONG_KEYS: Final = ("mm_data", "multimodal_data", "multi_modal", "multimodal", "multi_modal_inputs", "mm_kwargs")
# Keys that hold media if they are beside token ids, and may hold other things elsewhere.
_WRONG_KEYS_BESIDE_TOKENS: Final = (
    *("mm", "multi_modal_kwargs", "images", "videos", "audios", "image_data", "audio_data"),
    *("pixel_values", "input_features"),
)
_CONTAINER_PATHS: Final = ((), *(path[:depth] for path in TOKENS_PATHS for depth in range(1, len(path) + 1)))

_ABSENT: Final = "absent"  # the entry of a column that does not have the modality
_ID_DTYPE: Final = np.dtype(np.int64)


class MediaRow(NamedTuple):
    """One media item of a step: its entry in each of the three columns."""

    hash: Any
    placeholder: Any
    item: Any

    @property
    def start(self) -> Any:
        return get_field(self.placeholder, "offset")

    @property
    def end(self) -> Any:
        return self.start + get_field(self.placeholder, "length")


MediaTable: TypeAlias = dict[str, list[MediaRow]]  # by modality
RowsByOffset: TypeAlias = dict[tuple[str, Any], list[int]]  # row numbers by modality and offset


@dataclass(frozen=True, slots=True)
class Step:
    """The media of one step, on the step and on its response, and its token ids.

    `ids` are the prompt and the completion as bytes of int64, None if the step has no token ids.
    """

    number: int
    ids: tuple[bytes, bytes] | None
    data: tuple[Any, Any]
    tables: tuple[MediaTable, MediaTable]
    rows_by_offset: tuple[RowsByOffset, RowsByOffset]

    @classmethod
    def read(cls, number: int, step: Any) -> Step:
        """Read one step. Raises `StepMediaError`."""
        _check_keys(number, step)
        data = (get_media(step, TOKENS_PATHS[ON_STEP]), get_media(step, TOKENS_PATHS[ON_RESPONSE]))
        tables = (read_table(number, data[0]), read_table(number, data[1]))
        return cls(number, read_ids(number, step), data, tables, (_by_offset(tables[0]), _by_offset(tables[1])))

    @property
    def num_tokens(self) -> int:
        return 0 if self.ids is None else sum(map(len, self.ids)) // _ID_DTYPE.itemsize

    def find(self, place: int, modality: str, wanted: MediaRow) -> int | None:
        """The number of the row at `place` that equals `wanted` and has the same offset; None if there is none."""
        table = self.tables[place].get(modality, [])
        for index in self.rows_by_offset[place].get((modality, wanted.start), ()):
            if same_value(table[index], wanted):
                return index
        return None


def read_ids(number: int, step: Any) -> tuple[bytes, bytes] | None:
    """The prompt ids and completion ids as bytes of int64, None if the step has none. Raises `StepMediaError`."""
    for path in TOKENS_PATHS:
        tokens = _get_container(step, path)
        prompt, completion = get_field(tokens, "prompt_ids"), get_field(tokens, "completion_ids")
        if prompt is not None and completion is not None:
            try:
                return _id_bytes(prompt), _id_bytes(completion)
            except (TypeError, ValueError, OverflowError) as error:
                raise StepMediaError(number, f"its token ids are no ids: {error}", "Pass lists of ints.") from error
    return None


def read_table(number: int, data: Any) -> MediaTable:
    """The three columns of multi-modal data as rows. Raises `StepMediaError` unless the columns are parallel."""
    if _is_present(data) and all(get_field(data, name) is None for name in COLUMNS):
        names = list(data) if isinstance(data, Mapping) else type(data).__qualname__
        reason = f"its media have none of {', '.join(COLUMNS)} but {short_repr(names)}"
        raise StepMediaError(number, reason, "Give the columns these names.")
    columns = [get_field(data, name) or {} for name in COLUMNS]
    if not all(isinstance(column, Mapping) for column in columns):
        raise StepMediaError(number, "its columns are not dicts", "Make each a dict from modality to a list.")
    table: MediaTable = {}
    for modality in dict.fromkeys(modality for column in columns for modality in column):
        lists = [column.get(modality, _ABSENT) for column in columns]
        lengths = {len(entries) for entries in lists if type(entries) in (list, tuple)}
        if any(type(entries) not in (list, tuple) and entries is not _ABSENT for entries in lists) or len(lengths) != 1:
            reason = f"its {modality} columns are not parallel lists"
            raise StepMediaError(number, reason, "Give each media item one entry in each column.")
        rows = range(lengths.pop())
        table[modality] = [
            MediaRow(*(entries if entries is _ABSENT else entries[row] for entries in lists)) for row in rows
        ]
        for _, placeholder, _ in table[modality]:
            if not all(isinstance(get_field(placeholder, name), (int, np.integer)) for name in ("offset", "length")):
                reason = f"{modality} placeholder {short_repr(placeholder)}"
                raise StepMediaError(number, reason, "Give it an offset and a length.")
    return table


def get_field(container: Any, name: str) -> Any:
    """The value of a dict's key or an object's attribute, None if there is none."""
    return container.get(name) if isinstance(container, Mapping) else getattr(container, name, None)


def get_media(step: Any, path: Sequence[str]) -> Any:
    """The multi-modal data in the tokens at `path`, None if there are none."""
    return get_field(_get_container(step, path), MEDIA_KEY)


def with_media(step: Any, path: Sequence[str], data: Any) -> Any:
    """A copy of the step with other multi-modal data at `path`: copies the containers on the path, shares the rest."""
    changed = data
    for depth in reversed(range(len(path) + 1)):
        changed = with_fields(_get_container(step, path[:depth]), {(*path, MEDIA_KEY)[depth]: changed})
    return changed


def with_fields(container: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dict or an object with some of its values replaced."""
    if isinstance(container, Mapping):
        changed = copy.copy(container) if isinstance(container, MutableMapping) else dict(container)
        changed.update(values)
        return changed
    if isinstance(container, tuple) and hasattr(container, "_replace"):
        return container._replace(**values)
    changed = copy.copy(container)
    for name, value in values.items():
        object.__setattr__(changed, name, value)  # works on frozen dataclasses and models, too
    return changed


def _get_container(step: Any, path: Sequence[str]) -> Any:
    for name in path:
        step = get_field(step, name)
    return step


def _id_bytes(values: Any) -> bytes:
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{ids.dtype} of shape {ids.shape}")
    return ids.astype(_ID_DTYPE).tobytes()


def _check_keys(number: int, step: Any) -> None:
    """Raise for media under another key than `multi_modal_data`, and for that key in another container."""
    for path in _CONTAINER_PATHS:
        container = _get_container(step, path)
        if container is None or isinstance(container, str | bytes):
            continue
        beside_tokens = path in TOKENS_PATHS
        wrong = (*_WRONG_KEYS, *(_WRONG_KEYS_BESIDE_TOKENS if beside_tokens else (MEDIA_KEY,)))
        names = container if isinstance(container, Mapping) else getattr(container, "__dict__", {})
        others = {name for name in names if isinstance(name, str)} - {*wrong, MEDIA_KEY}
        for key in (*wrong, *sorted(others)):
            value = get_field(container, key)
            if _is_present(value) and (key in wrong or any(_is_present(get_field(value, name)) for name in COLUMNS)):
                places = " and ".join(".".join((*place, MEDIA_KEY)) for place in TOKENS_PATHS)
                reason = f"its media are under {'.'.join((*path, key))}"
                raise StepMediaError(number, reason, f"Media belong under {places}: move them.")


def _is_present(value: Any) -> bool:
    """Whether a value is given; the empty dict of a step without media counts as absent."""
    return value is not None and not (isinstance(value, Mapping | Sequence) and not len(value))


def _by_offset(table: MediaTable) -> RowsByOffset:
    rows: RowsByOffset = {}
    for modality, entries in table.items():
        for index, entry in enumerate(entries):
            rows.setdefault((modality, entry.start), []).append(index)
    return rows


# Removing repeated media from a step list, and restoring them.
#
# In the step lists of other libraries each step holds all media of its prompt, so N steps hold N(N+1)/2 images, and
# each of them again on the response (`step_reading` shows the layout).
#
# A step follows an earlier step if its prompt begins with the prompt and completion of the earlier step, token by
# token. An item that both have at the same tokens is removed from the later step. All other items are kept: a step with
# a rewritten history, the first step of another agent and a sibling keep their media, even if another step has equal
# media.


LINEAGE: Final = "multi_modal_lineage"
"""The key or attribute of shortened multi-modal data that says where the removed media are."""

# The source of the media of a run (see `_runs`).
_KEPT, _PARENT_STEP, _PARENT_RESPONSE, _OWN_STEP = range(4)

_RESTORE_WHOLE: Final = (
    "Restore the whole list that drop_intermediate_multi_modal_data returned, in its order, and edit it then."
)


@wire_type("transport.ShortenedMedia")
@dataclass(frozen=True, slots=True)
class ShortenedMedia:
    """Replaces a multi-modal data object (not a dict) from which media were removed.

    The columns hold the media that were kept. `original` is the object without its media.
    """

    mm_hashes: Any
    mm_placeholders: Any
    mm_items: Any
    multi_modal_lineage: dict[str, Any] = field(repr=False)
    original: Any = field(repr=False)


def drop_intermediate_multi_modal_data(steps: Sequence[Any]) -> list[Any]:
    """The steps, with each media item only at the step that introduced it.

    Steps, `tokens`, `response`, `message` and multi-modal data are dicts or objects with attributes; multi-modal data
    have `mm_hashes`, `mm_placeholders` and `mm_items`, each a dict from modality to a list, the lists parallel, and
    placeholders have `offset` and `length` in tokens of the prompt. Media under other keys (`mm_data`...) are an error.
    An item is removed from a step, in all three columns, if the step that it follows has an item with an equal hash and
    equal data at the same tokens. It is removed from the response if the step's own `tokens` have it. Steps without
    token ids follow no other step.

    The steps given are not changed; those that lose nothing are returned as they are. A shortened dict has the
    additional key `multi_modal_lineage`, a shortened object becomes a `ShortenedMedia`; the kept media can be read as
    before. Pass the whole result, in this order, to `restore_multi_modal_data`. Raises `StepMediaError`.
    """
    read = [Step.read(index, step) for index, step in enumerate(steps)]
    earlier = _EarlierSteps()
    shortened = []
    for original, step in zip(steps, read, strict=True):
        if any(get_field(data, LINEAGE) is not None for data in step.data):
            raise StepMediaError(step.number, "its media were removed already", "Call restore_multi_modal_data first.")
        parent = _choose_parent(step, [read[index] for index in earlier.followed_by(step.ids)])
        short = original
        for place, data in enumerate(step.data):
            runs = _runs(step, place, parent)
            if any(source != _KEPT for of_modality in runs.values() for source, _, _ in of_modality):
                record = {"parent": -1 if parent is None else parent.step.number, "runs": runs}
                short = with_media(short, TOKENS_PATHS[place], _shorten(data, record))
        earlier.add(step)
        shortened.append(short)
    return shortened


def restore_multi_modal_data(steps: Sequence[Any]) -> list[Any]:
    """The steps that were passed to `drop_intermediate_multi_modal_data`, with all media in their order.

    Removed items become the objects of the step that kept them, not copies. The steps given are not changed. Raises
    `StepMediaError` if the list is not the returned list: steps were removed, reordered or edited.
    """
    restored: list[Any] = []
    read: list[Step] = []
    for number, step in enumerate(steps):
        whole = step
        for path in TOKENS_PATHS:
            data = get_media(whole, path)
            record = get_field(data, LINEAGE)
            if record is not None:
                whole = with_media(whole, path, _restore(number, data, record, _sources(number, whole, record, read)))
        restored.append(whole)
        read.append(Step.read(number, whole))
    return restored


class _EarlierSteps:
    """The steps so far, found by a digest of their tokens, so that no two steps have to be compared."""

    def __init__(self) -> None:
        self._steps: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)  # by length and digest
        self._lengths: list[int] = []  # sorted, each length once

    def add(self, step: Step) -> None:
        if step.ids is None:
            return
        tokens = b"".join(step.ids)
        self._steps[len(tokens), _hash(tokens).digest()].append(step.number)
        position = bisect_right(self._lengths, len(tokens))
        if not position or self._lengths[position - 1] != len(tokens):
            self._lengths.insert(position, len(tokens))

    def followed_by(self, ids: tuple[bytes, bytes] | None) -> list[int]:
        """The steps that a step with these ids follows: the longest first, of equal length the latest first."""
        if ids is None:
            return []
        prompt, hashing, hashed = memoryview(ids[0]), _hash(b""), 0
        found: list[int] = []
        for length in self._lengths[: bisect_right(self._lengths, len(prompt))]:
            hashing.update(prompt[hashed:length])
            hashed = length
            found += self._steps.get((length, hashing.copy().digest()), ())
        return found[::-1]


def _hash(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


@dataclass(frozen=True, slots=True)
class _Parent:
    """The step that another step follows.

    `matches` are the items of the other step at `place` that the parent has, too: (modality, row) -> (source, row of
    the parent). They are stored because finding them compares the data of the items.
    """

    step: Step
    place: int
    matches: dict[tuple[str, int], tuple[int, int]]

    def match(self, place: int, modality: str, row: int, item: MediaRow) -> tuple[int, int] | None:
        return self.matches.get((modality, row)) if place == self.place else _find_in(self.step, modality, item)


def _choose_parent(step: Step, candidates: list[Step]) -> _Parent | None:
    """The candidate with most of the step's media, of equals the first; None if none has any.

    This is usually the longest candidate. Another one can have more: two agents with the same text and different images
    of one size have equal tokens.
    """
    best: _Parent | None = None
    place = ON_STEP if any(step.tables[ON_STEP].values()) else ON_RESPONSE
    rows = [((kind, row), item) for kind, table in step.tables[place].items() for row, item in enumerate(table)]
    for candidate in candidates:
        most = 0 if best is None else len(best.matches)
        if sum(item.end <= candidate.num_tokens for _, item in rows) <= most:
            break  # shorter candidates can have only fewer
        matches = {key: found for key, item in rows if (found := _find_in(candidate, key[0], item)) is not None}
        if len(matches) > most:
            best = _Parent(candidate, place, matches)
    return best


def _find_in(parent: Step, modality: str, item: MediaRow) -> tuple[int, int] | None:
    """(source, row) of an equal item of the parent at the same tokens; None if there is none."""
    if item.end > parent.num_tokens:
        return None
    for place, source in ((ON_STEP, _PARENT_STEP), (ON_RESPONSE, _PARENT_RESPONSE)):
        index = parent.find(place, modality, item)
        if index is not None:
            return source, index
    return None


def _runs(step: Step, place: int, parent: _Parent | None) -> dict[str, list[list[int]]]:
    """Per modality the sources of the media at a place, in order, as runs [source, first row, count]."""
    runs: dict[str, list[list[int]]] = {}
    for modality, table in step.tables[place].items():
        runs[modality] = []
        kept = 0
        for row, item in enumerate(table):
            source, index = _source(step, place, parent, modality, row, item) or (_KEPT, kept)
            kept += source == _KEPT
            last = runs[modality][-1] if runs[modality] else None
            if last is not None and last[0] == source and last[1] + last[2] == index:
                last[2] += 1
            else:
                runs[modality].append([source, index, 1])
    return runs


def _source(
    step: Step, place: int, parent: _Parent | None, modality: str, row: int, item: MediaRow
) -> tuple[int, int] | None:
    if place == ON_RESPONSE:
        index = step.find(ON_STEP, modality, item)
        if index is not None:
            return _OWN_STEP, index
    return None if parent is None else parent.match(place, modality, row, item)


def _sources(number: int, step: Any, record: Any, read: list[Step]) -> dict[int, MediaTable]:
    """The media tables that the runs of a shortened step refer to, by source."""
    parent = get_field(record, "parent")
    sources = {_OWN_STEP: read_table(number, get_media(step, TOKENS_PATHS[ON_STEP]))}
    if parent == -1:
        return sources
    ids = read_ids(number, step)
    before = read[parent] if type(parent) is int and 0 <= parent < len(read) else None
    if before is None or before.ids is None or ids is None or not ids[0].startswith(b"".join(before.ids)):
        raise StepMediaError(number, f"step {parent}, which has its removed media, is missing", _RESTORE_WHOLE)
    return {**sources, _PARENT_STEP: before.tables[ON_STEP], _PARENT_RESPONSE: before.tables[ON_RESPONSE]}


def _shorten(data: Any, record: dict[str, Any]) -> Any:
    """`data` with only the kept media, and the record of the others."""
    columns = {name: get_field(data, name) for name in COLUMNS}
    for name, column in columns.items():
        if column is not None:
            kept = {modality: _kept_entries(column[modality], record["runs"][modality]) for modality in column}
            columns[name] = with_fields(column, kept)
    if isinstance(data, Mapping):
        present = {name: column for name, column in columns.items() if name in data}
        return with_fields(data, {**present, LINEAGE: record})
    emptied = data
    for name in COLUMNS:
        if get_field(data, name) is not None:
            emptied = with_fields(emptied, {name: {}})
    return ShortenedMedia(**columns, multi_modal_lineage=record, original=emptied)


def _kept_entries(entries: Any, runs: list[list[int]]) -> Any:
    """The entries of the kept media, in a sequence of the same type."""
    kept = []
    position = 0
    for source, _, count in runs:
        if source == _KEPT:
            kept += entries[position : position + count]
        position += count
    return type(entries)(kept)


def _restore(number: int, data: Any, record: Any, sources: dict[int, MediaTable]) -> Any:
    """The inverse of `_shorten`."""
    sources = {**sources, _KEPT: read_table(number, data)}
    rows: MediaTable = {}
    columns = {}
    try:
        for modality, runs in record["runs"].items():
            rows[modality] = []
            kept = 0
            for source, start, count in runs:
                found = sources[source][modality][start : start + count]
                if len(found) != count:
                    reason = f"{count - len(found)} removed {modality} media are missing"
                    raise StepMediaError(number, reason, _RESTORE_WHOLE)
                if source == _KEPT and start != kept:
                    raise StepMediaError(number, f"its kept {modality} media were edited", _RESTORE_WHOLE)
                kept += count if source == _KEPT else 0
                rows[modality] += found
            if kept != len(sources[_KEPT].get(modality, ())):
                raise StepMediaError(number, f"its kept {modality} media were edited", _RESTORE_WHOLE)
        for index, name in enumerate(COLUMNS):
            column = get_field(data, name)
            if column is not None:
                entries = {kind: type(column[kind])(row[index] for row in rows[kind]) for kind in column}
                columns[name] = with_fields(column, entries)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StepMediaError(number, f"its {LINEAGE} is invalid: {error!r}", _RESTORE_WHOLE) from error
    if not isinstance(data, Mapping):
        return with_fields(data.original, columns)
    whole = with_fields(data, columns)
    del whole[LINEAGE]
    return whole
