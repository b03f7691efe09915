"""The media of a list of steps, each image's data once: dropped where an earlier step carries it, and put back.

A step of the ecosystem's shape holds everything its prompt shows, so N steps hold N(N+1)/2 images, and each of them a
second time on the response:

    step["tokens"]["prompt_ids"], ["completion_ids"], ["multi_modal_data"]
    step["response"].message.tokens.multi_modal_data

A step follows an earlier one if that one's prompt and completion, token by token, begin its prompt. What both show at
the same place is left out of the later one. Nothing else is: a step whose history was rewritten, the first step of
another agent, a sibling, keeps all it shows, however often the image was seen elsewhere.
"""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from transport.errors import StepMediaError
from transport.interop.same_value import same_value
from transport.wire.registry import wire_type

LINEAGE: Final = "multi_modal_lineage"
"""The key, or attribute, under which shortened multi-modal data say what belongs between what they kept."""

_MEDIA = "multi_modal_data"
_COLUMNS = ("mm_hashes", "mm_placeholders", "mm_items")
_PLACES = (("tokens",), ("response", "message", "tokens"))
_TOKENS, _RESPONSE = range(2)

# Where other programs keep media, or would. Passed over, they would be sent in full, or be missing from a tree.
_OTHER_SPELLINGS = ("mm_data", "multimodal_data", "multi_modal", "multimodal", "multi_modal_inputs", "mm_kwargs")
# Names that say nothing of media elsewhere, but do among token ids.
_OTHER_SPELLINGS_OF_TOKENS = ("mm", "multi_modal_kwargs", "images", "videos", "image_data", "pixel_values")
_CONTAINERS = ((), *(path[:depth] for path in _PLACES for depth in range(1, len(path) + 1)))

# Where the entries of a run come from.
_KEPT, _PARENT_TOKENS, _PARENT_RESPONSE, _OWN_TOKENS = range(4)

_WHOLE = "Restore the whole list that drop_intermediate_multi_modal_data returned, in its order, and edit it then."
_ABSENT: Final = "absent"  # in place of an entry of a column that the modality lacks


@wire_type("transport.ShortenedMedia")
@dataclass(frozen=True, slots=True)
class ShortenedMedia:
    """What stands for a multi-modal data object (not a dict) from which media were dropped.

    The columns hold what was kept. `original` is the object itself without its media.
    """

    mm_hashes: Any
    mm_placeholders: Any
    mm_items: Any
    multi_modal_lineage: dict[str, Any] = field(repr=False)
    original: Any = field(repr=False)


def drop_intermediate_multi_modal_data(steps: Sequence[Any]) -> list[Any]:
    """The steps with each medium's data at the step that introduced it only.

    Steps, `tokens`, `response`, `message` and multi-modal data are dicts or objects with attributes; multi-modal data
    have `mm_hashes`, `mm_placeholders` and `mm_items`, each a dict from modality to a list, the lists parallel, and
    placeholders have `offset` and `length` in tokens of the prompt. Media under other names (`mm_data`...) are an
    error, not passed over. A step keeps, in all three columns, what the step
    that it follows does not carry at the same tokens with an equal hash and equal data. On the response it keeps what
    is not on its own `tokens`. Steps without token ids follow none.

    The steps given are not changed; those that lose nothing are returned as they are. What was kept can be read as
    before; a dict has the key `multi_modal_lineage` more, an object becomes a `ShortenedMedia`. The result is for
    `restore_multi_modal_data`, in whole and in this order. Raises `StepMediaError`.
    """
    known = [_Step.read(index, step) for index, step in enumerate(steps)]
    lineage = _Lineage()
    shortened = []
    for step, media in zip(steps, known, strict=True):
        if any(_record(data) is not None for data in media.data):
            raise StepMediaError(media.number, "its media were dropped already", "Call restore_multi_modal_data first.")
        parent = _best_parent(media, [known[index] for index in lineage.before(media.ids)])
        short = step
        for place, data in enumerate(media.data):
            runs = _runs(media, place, parent)
            if any(source != _KEPT for of_modality in runs.values() for source, _, _ in of_modality):
                record = {"parent": -1 if parent is None else parent.step.number, "runs": runs}
                short = _put(short, _PLACES[place], _shorten(data, record))
        lineage.add(media)
        shortened.append(short)
    return shortened


def restore_multi_modal_data(steps: Sequence[Any]) -> list[Any]:
    """The steps that `drop_intermediate_multi_modal_data` was given: order, counts and ranges, at both places.

    Items that were dropped are the objects of the step that kept them, not copies. The steps given are not changed.
    Raises `StepMediaError` if the list is not the one that was returned then: steps removed, reordered or edited.
    """
    restored: list[Any] = []
    known: list[_Step] = []
    for number, step in enumerate(steps):
        whole = step
        for path in _PLACES:
            data = _at(whole, path)
            record = _record(data)
            if record is not None:
                whole = _put(whole, path, _lengthen(number, data, record, _pools(number, whole, record, known)))
        restored.append(whole)
        known.append(_Step.read(number, whole))
    return restored


class _Entry(NamedTuple):
    """One medium of a step: a row through the three columns."""

    hash: Any
    placeholder: Any
    item: Any

    @property
    def start(self) -> Any:
        return _field(self.placeholder, "offset")

    @property
    def end(self) -> Any:
        return self.start + _field(self.placeholder, "length")


_Table = dict[str, list[_Entry]]


@dataclass(frozen=True, slots=True)
class _Step:
    """What of a step matters here. `ids` are prompt and completion as bytes, None if the step has none."""

    number: int
    ids: tuple[bytes, bytes] | None
    data: tuple[Any, Any]
    tables: tuple[_Table, _Table]
    by_offset: tuple[dict[tuple[str, Any], list[int]], dict[tuple[str, Any], list[int]]]

    @classmethod
    def read(cls, number: int, step: Any) -> _Step:
        _check_spelling(number, step)
        data = (_at(step, _PLACES[_TOKENS]), _at(step, _PLACES[_RESPONSE]))
        tables = (_table(number, data[0]), _table(number, data[1]))
        return cls(number, _ids(number, step), data, tables, (_by_offset(tables[0]), _by_offset(tables[1])))

    @property
    def num_tokens(self) -> int:
        return 0 if self.ids is None else sum(map(len, self.ids)) // _ID.itemsize

    def find(self, place: int, modality: str, wanted: _Entry) -> int | None:
        """Where among the media of a place there is one equal to `wanted` at the same tokens."""
        table = self.tables[place].get(modality, [])
        for index in self.by_offset[place].get((modality, wanted.start), ()):
            if same_value(table[index], wanted):
                return index
        return None


class _Lineage:
    """The steps so far, found by their tokens: digests instead of a comparison of each with each."""

    def __init__(self) -> None:
        self._steps: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
        self._lengths: list[int] = []

    def add(self, step: _Step) -> None:
        if step.ids is None:
            return
        length = sum(map(len, step.ids))
        hashing = _hashing()
        for part in step.ids:
            hashing.update(part)
        self._steps[length, hashing.digest()].append(step.number)
        at = bisect_right(self._lengths, length)
        if not at or self._lengths[at - 1] != length:
            self._lengths.insert(at, length)

    def before(self, ids: tuple[bytes, bytes] | None) -> list[int]:
        """The steps whose prompt and completion begin this prompt, the longest first, the latest of equals first."""
        if ids is None:
            return []
        prompt, hashing, done = memoryview(ids[0]), _hashing(), 0
        found: list[int] = []
        for length in self._lengths[: bisect_right(self._lengths, len(prompt))]:
            hashing.update(prompt[done:length])
            done = length
            found += self._steps.get((length, hashing.copy().digest()), ())
        return found[::-1]


_ID = np.dtype(np.int64)


def _hashing() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


@dataclass(frozen=True, slots=True)
class _Parent:
    """The step that another follows. `carried` says where the entries of `place` are in it: (modality, row) -> where.

    Kept because to look for them compares their data.
    """

    step: _Step
    place: int
    carried: dict[tuple[str, int], tuple[int, int]]

    def carries(self, place: int, modality: str, row: int, entry: _Entry) -> tuple[int, int] | None:
        return self.carried.get((modality, row)) if place == self.place else _carried(self.step, modality, entry)


def _best_parent(step: _Step, candidates: list[_Step]) -> _Parent | None:
    """The step that carries most of this one's media, the longest of equals; None if none carries any.

    Usually that is the longest. Two agents that say the same about two images of one size have equal tokens.
    """
    best: _Parent | None = None
    place = _TOKENS if any(step.tables[_TOKENS].values()) else _RESPONSE
    rows = [((kind, row), entry) for kind, table in step.tables[place].items() for row, entry in enumerate(table)]
    for candidate in candidates:
        most = 0 if best is None else len(best.carried)
        if sum(entry.end <= candidate.num_tokens for _, entry in rows) <= most:
            break  # shorter ones have even fewer
        found = {key: where for key, entry in rows if (where := _carried(candidate, key[0], entry)) is not None}
        if len(found) > most:
            best = _Parent(candidate, place, found)
    return best


def _carried(parent: _Step, modality: str, entry: _Entry) -> tuple[int, int] | None:
    """(source, index) of a medium among those of the step before, None if it is not there or not within its tokens."""
    if entry.end > parent.num_tokens:
        return None
    for place, source in ((_TOKENS, _PARENT_TOKENS), (_RESPONSE, _PARENT_RESPONSE)):
        index = parent.find(place, modality, entry)
        if index is not None:
            return source, index
    return None


def _runs(step: _Step, place: int, parent: _Parent | None) -> dict[str, list[list[int]]]:
    """Per modality, [source, start, count]: where the media of a place come from, in order."""
    runs: dict[str, list[list[int]]] = {}
    for modality, table in step.tables[place].items():
        runs[modality] = []
        kept = 0
        for row, entry in enumerate(table):
            source, index = _source(step, place, parent, modality, row, entry) or (_KEPT, kept)
            kept += source == _KEPT
            last = runs[modality][-1] if runs[modality] else None
            if last is not None and last[0] == source and last[1] + last[2] == index:
                last[2] += 1
            else:
                runs[modality].append([source, index, 1])
    return runs


def _source(
    step: _Step, place: int, parent: _Parent | None, modality: str, row: int, entry: _Entry
) -> tuple[int, int] | None:
    if place == _RESPONSE:
        index = step.find(_TOKENS, modality, entry)
        if index is not None:
            return _OWN_TOKENS, index
    return None if parent is None else parent.carries(place, modality, row, entry)


def _record(data: Any) -> Any:
    return _field(data, LINEAGE)


def _pools(number: int, step: Any, record: Any, known: list[_Step]) -> dict[int, _Table]:
    """The media that a shortened step may refer to, by source."""
    parent = _field(record, "parent")
    pools = {_OWN_TOKENS: _table(number, _at(step, _PLACES[_TOKENS]))}
    if parent == -1:
        return pools
    ids = _ids(number, step)
    before = known[parent] if type(parent) is int and 0 <= parent < len(known) else None
    if before is None or before.ids is None or ids is None or not ids[0].startswith(b"".join(before.ids)):
        raise StepMediaError(number, f"its media were dropped because step {parent} carried them: it is gone", _WHOLE)
    return {**pools, _PARENT_TOKENS: before.tables[_TOKENS], _PARENT_RESPONSE: before.tables[_RESPONSE]}


def _shorten(data: Any, record: dict[str, Any]) -> Any:
    """`data` with the kept media only, and the record of where the others are."""
    columns = {}
    for name in _COLUMNS:
        column = _field(data, name)
        columns[name] = column
        if column is not None:
            kept = {modality: _chosen(column[modality], record["runs"][modality]) for modality in column}
            columns[name] = _with(column, kept)
    if isinstance(data, Mapping):
        present = {name: column for name, column in columns.items() if name in data}
        return _with(data, {**present, LINEAGE: record})
    emptied = data
    for name in _COLUMNS:
        if _field(data, name) is not None:
            emptied = _with(emptied, {name: {}})
    return ShortenedMedia(**columns, multi_modal_lineage=record, original=emptied)


def _chosen(entries: Any, runs: list[list[int]]) -> Any:
    """The entries that no other place has, in a sequence of the same type."""
    kept = []
    position = 0
    for source, _, count in runs:
        if source == _KEPT:
            kept += entries[position : position + count]
        position += count
    return type(entries)(kept)


def _lengthen(number: int, data: Any, record: Any, pools: dict[int, _Table]) -> Any:
    """The inverse of `_shorten`."""
    pools = {**pools, _KEPT: _table(number, data)}
    rows: _Table = {}
    columns = {}
    try:
        for modality, runs in record["runs"].items():
            rows[modality] = []
            kept = 0
            for source, start, count in runs:
                found = pools[source][modality][start : start + count]
                if len(found) != count:
                    raise StepMediaError(number, f"{count - len(found)} dropped {modality} media are gone", _WHOLE)
                if source == _KEPT and start != kept:
                    raise StepMediaError(number, f"its kept {modality} media are not those that were kept", _WHOLE)
                kept += count if source == _KEPT else 0
                rows[modality] += found
            if kept != len(pools[_KEPT].get(modality, ())):
                raise StepMediaError(number, f"its kept {modality} media are not those that were kept", _WHOLE)
        for at, name in enumerate(_COLUMNS):
            column = _field(data, name)
            if column is not None:
                columns[name] = _with(
                    column, {modality: type(column[modality])(row[at] for row in rows[modality]) for modality in column}
                )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StepMediaError(number, f"where its dropped media are is not said: {error!r}", _WHOLE) from error
    if not isinstance(data, Mapping):
        return _with(data.original, columns)
    whole = _with(data, columns)
    del whole[LINEAGE]
    return whole


def _ids(number: int, step: Any) -> tuple[bytes, bytes] | None:
    for path in _PLACES:
        tokens = _inside(step, path)
        prompt, completion = _field(tokens, "prompt_ids"), _field(tokens, "completion_ids")
        if prompt is not None and completion is not None:
            try:
                return _id_bytes(prompt), _id_bytes(completion)
            except (TypeError, ValueError, OverflowError) as error:
                raise StepMediaError(number, f"its token ids are no ids: {error}", "Pass lists of ints.") from error
    return None


def _id_bytes(values: Any) -> bytes:
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{ids.dtype} of shape {ids.shape}")
    return ids.astype(_ID).tobytes()


def _check_spelling(number: int, step: Any) -> None:
    """Raise for media under another key than `multi_modal_data`, and for that key where it is not looked for."""
    for path in _CONTAINERS:
        container = _inside(step, path)
        if container is None or isinstance(container, str | bytes):
            continue
        wrong = (*_OTHER_SPELLINGS, *(_OTHER_SPELLINGS_OF_TOKENS if path in _PLACES else (_MEDIA,)))
        right = {_MEDIA} if path in _PLACES else set()
        others = set(_names(container)) - right
        for key in (*wrong, *sorted(others - set(wrong))):
            value = _field(container, key)
            if _holds(value) and (key in wrong or any(_holds(_field(value, name)) for name in _COLUMNS)):
                places = " and ".join(".".join((*place, _MEDIA)) for place in _PLACES)
                raise StepMediaError(
                    number, f"its media are under {'.'.join((*path, key))}", f"Media belong under {places}: move them."
                )


def _names(container: Any) -> list[str]:
    """The keys of a dict, or the attributes of an object, as far as they are text."""
    names = container if isinstance(container, Mapping) else getattr(container, "__dict__", {})
    return [name for name in names if isinstance(name, str)]


def _holds(value: Any) -> bool:
    """Whether something is there; the empty dict of a step without media is nothing."""
    return value is not None and not (isinstance(value, Mapping | Sequence) and not len(value))


def _table(number: int, data: Any) -> _Table:
    """The columns as rows, per modality. Raises unless they are parallel."""
    if _holds(data) and all(_field(data, name) is None for name in _COLUMNS):
        names = list(data) if isinstance(data, Mapping) else type(data).__qualname__
        raise StepMediaError(
            number, f"its media have none of {', '.join(_COLUMNS)} but {names!r:.200}", "Name the columns so."
        )
    columns = [_field(data, name) or {} for name in _COLUMNS]
    if not all(isinstance(column, Mapping) for column in columns):
        raise StepMediaError(number, "its columns are not dicts", "Make each a dict from modality to a list.")
    table: _Table = {}
    for modality in dict.fromkeys(modality for column in columns for modality in column):
        lists = [column.get(modality, _ABSENT) for column in columns]
        lengths = {len(one) for one in lists if type(one) in (list, tuple)}
        if any(type(one) not in (list, tuple) and one is not _ABSENT for one in lists) or len(lengths) != 1:
            raise StepMediaError(
                number, f"its {modality} columns are not parallel lists", "Give each medium one entry in each."
            )
        rows = range(lengths.pop())
        table[modality] = [_Entry(*(one if one is _ABSENT else one[row] for one in lists)) for row in rows]
        for _, where, _ in table[modality]:
            if not all(isinstance(_field(where, name), (int, np.integer)) for name in ("offset", "length")):
                raise StepMediaError(number, f"{modality} placeholder {where!r:.80}", "Give it an offset and a length.")
    return table


def _by_offset(table: _Table) -> dict[tuple[str, Any], list[int]]:
    places: dict[tuple[str, Any], list[int]] = {}
    for modality, entries in table.items():
        for index, entry in enumerate(entries):
            places.setdefault((modality, entry.start), []).append(index)
    return places


# Dicts and objects alike.


def _field(container: Any, name: str) -> Any:
    return container.get(name) if isinstance(container, Mapping) else getattr(container, name, None)


def _inside(step: Any, path: Sequence[str]) -> Any:
    for name in path:
        step = _field(step, name)
    return step


def _at(step: Any, path: Sequence[str]) -> Any:
    return _field(_inside(step, path), _MEDIA)


def _put(step: Any, path: Sequence[str], data: Any) -> Any:
    """The step with other multi-modal data at a place: the containers on the way are copies, the rest is shared."""
    changed = data
    for depth in reversed(range(len(path) + 1)):
        changed = _with(_inside(step, path[:depth]), {(*path, _MEDIA)[depth]: changed})
    return changed


def _with(container: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dict or an object with some of its values exchanged."""
    if isinstance(container, Mapping):
        changed = copy.copy(container) if isinstance(container, MutableMapping) else dict(container)
        changed.update(values)
        return changed
    if isinstance(container, tuple) and hasattr(container, "_replace"):
        return container._replace(**values)
    changed = copy.copy(container)
    for name, value in values.items():
        object.__setattr__(changed, name, value)  # frozen dataclasses and models, too
    return changed
