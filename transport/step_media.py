"""Step lists that hold each medium once: repeated media are removed from them, and restored.

In a step list each step holds all media of its prompt, so N steps hold N(N+1)/2 images, and each of them
again on the response: in `step["tokens"]["multi_modal_data"]` and in
`step["response"].message.tokens.multi_modal_data`. Steps and the containers on these paths are dicts or
objects with attributes.

A step follows an earlier step if its prompt begins with the prompt and completion of the earlier step, token
by token. An item that both have at the same tokens is removed from the later step. All other items are kept:
a step with a rewritten history, the first step of another agent and a sibling keep their media, even if
another step has equal media.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from renderers.errors import short_repr
from renderers.rendered import MultiModalData, PlaceholderRange
from transport.errors import EncodeError, TransportError
from transport.inline_arrays import COLUMNS
from transport.wire.codec import encode

MEDIA_KEY: Final = "multi_modal_data"
LINEAGE: Final = "multi_modal_lineage"
"""The key of shortened multi-modal data that says where the removed media are."""

_PATHS: Final = (("tokens",), ("response", "message", "tokens"))
_ON_TOKENS, _ON_RESPONSE = range(2)  # the positions in `_PATHS`
_ID_DTYPE: Final = np.dtype(np.int64)
_RESTORE_WHOLE: Final = (
    "Restore the whole list that drop_intermediate_multi_modal_data returned, in its order, and edit it then."
)


class _Row(NamedTuple):
    """One media item of a step: its entry in each of the three columns, None in a column without its modality."""

    hash: Any
    placeholder: Any
    item: Any

    @property
    def start(self) -> int:
        start: int = _field(self.placeholder, "offset")
        return start

    @property
    def end(self) -> int:
        length: int = _field(self.placeholder, "length")
        return self.start + length


_Table: TypeAlias = dict[str, list[_Row]]  # by modality
#: By modality and row: None for an item that was kept, else the step that has it (None: the step itself), the
#: position in `_PATHS` of the place where it has it, and the row there.
_References: TypeAlias = dict[str, list[list[int | None] | None]]


@dataclass(frozen=True, slots=True)
class _Step:
    """The media of a step on its tokens and on its response, and its token ids as bytes of int64, None without ids."""

    number: int
    prompt: bytes | None
    ids: bytes | None
    tables: tuple[_Table, _Table]

    @classmethod
    def read(cls, number: int, step: Any) -> _Step:
        prompt, ids = _read_ids(number, step)
        first, second = (_read_table(number, _get(step, (*path, MEDIA_KEY))) for path in _PATHS)
        return cls(number, prompt, ids, (first, second))

    def follows(self, earlier: _Step) -> bool:
        return self.prompt is not None and earlier.ids is not None and self.prompt.startswith(earlier.ids)


def drop_intermediate_multi_modal_data(steps: Sequence[Any]) -> list[Any]:
    """The steps, with each media item only at the step that introduced it.

    Multi-modal data are `MultiModalData`, or a dict of `mm_hashes`, `mm_placeholders` and `mm_items`, each a
    dict from modality to a list, the lists parallel; placeholders have `offset` and `length` in tokens of the
    prompt. An item is removed from a step, in all three columns, if the step that it follows has an item with
    an equal hash and equal data at the same tokens. It is removed from the response if the step's own
    `tokens` have it. Steps without token ids follow no other step.

    The steps given are not changed; those that lose nothing are returned as they are. Shortened data are a
    dict of the three columns with the additional key `multi_modal_lineage`. Pass the whole result, in this
    order, to `restore_multi_modal_data`. Raises `TransportError`.
    """
    read = [_Step.read(number, step) for number, step in enumerate(steps)]
    shortened = []
    for original, step in zip(steps, read, strict=True):
        earlier = [one for one in read[: step.number] if step.follows(one)]
        earlier.sort(key=lambda one: (len(one.ids or b""), one.number), reverse=True)  # most of them are in the longest
        short = original
        for place, path in enumerate(_PATHS):
            data = _get(original, (*path, MEDIA_KEY))
            if _field(data, LINEAGE) is not None:
                raise _step_error(step.number, "its media were removed already", "Call restore_multi_modal_data.")
            references: _References = {
                modality: [_find_row(step, place, earlier, modality, row) for row in rows]
                for modality, rows in step.tables[place].items()
            }
            if any(one is not None for of_modality in references.values() for one in of_modality):
                short = _with_media(short, path, _shortened(data, references))
        shortened.append(short)
    return shortened


def restore_multi_modal_data(steps: Sequence[Any]) -> list[Any]:
    """The steps that were passed to `drop_intermediate_multi_modal_data`, with all media in their order.

    Removed items become the objects of the step that kept them, not copies. The steps given are not changed.
    Raises `TransportError` if the list is not the returned list: steps were removed, reordered or edited.
    """
    restored: list[Any] = []
    read: list[_Step] = []
    for number, step in enumerate(steps):
        whole = step
        for place, path in enumerate(_PATHS):
            data = _get(whole, (*path, MEDIA_KEY))
            if _field(data, LINEAGE) is not None:
                whole = _with_media(whole, path, _restored(_Step.read(number, whole), place, data, read))
        restored.append(whole)
        read.append(_Step.read(number, whole))
    return restored


def _step_error(step: int, reason: str, cure: str) -> TransportError:
    return TransportError(f"step {step}: {reason}. {cure}")


def _find_row(step: _Step, place: int, earlier: Sequence[_Step], modality: str, row: _Row) -> list[int | None] | None:
    """Where an item at a place is, besides there."""
    if place == _ON_RESPONSE and (index := _index_of(row, step.tables[_ON_TOKENS].get(modality, ()))) is not None:
        return [None, _ON_TOKENS, index]
    for one in earlier:
        # Both have the tokens of the earlier step in common, and an item beyond them is no item of it.
        if row.end * _ID_DTYPE.itemsize > len(one.ids or b""):
            continue
        for source, table in enumerate(one.tables):
            if (index := _index_of(row, table.get(modality, ()))) is not None:
                return [one.number, source, index]
    return None


def _index_of(wanted: _Row, rows: Sequence[_Row]) -> int | None:
    return next((index for index, row in enumerate(rows) if row.start == wanted.start and _same(row, wanted)), None)


def _same(one: _Row, other: _Row) -> bool:
    """Whether two rows have equal types and bits, as far as these can be encoded."""
    if all(mine is theirs for mine, theirs in zip(one, other, strict=True)):
        return True
    try:
        return bool(one.hash == other.hash) and encode(list(one)) == encode(list(other))
    except EncodeError:
        return False


def _shortened(data: Any, references: _References) -> dict[str, Any]:
    """`data` with only the kept media, and the record of the others."""
    short = dict(data) if isinstance(data, Mapping) else {}
    for name in COLUMNS:
        column = _field(data, name)
        if column is not None:
            short[name] = {
                modality: type(entries)(
                    [entry for entry, one in zip(entries, references[modality], strict=True) if one is None]
                )
                for modality, entries in column.items()
            }
    short[LINEAGE] = {"media": references, "object": isinstance(data, MultiModalData)}
    return short


def _restored(step: _Step, place: int, data: Mapping[str, Any], read: Sequence[_Step]) -> Any:
    """The inverse of `_shortened`."""
    kept, columns = _read_table(step.number, data), {}
    try:
        record = data[LINEAGE]
        if kept.keys() != record["media"].keys():
            raise _step_error(step.number, "its kept media were edited", _RESTORE_WHOLE)
        rows = {
            modality: list(_restored_rows(step, place, modality, of_modality, kept[modality], read))
            for modality, of_modality in record["media"].items()
        }
        for index, name in enumerate(COLUMNS):
            column = data.get(name)
            if column is not None:
                columns[name] = {kind: type(column[kind])([row[index] for row in rows[kind]]) for kind in column}
        is_object = record["object"]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _step_error(step.number, f"its {LINEAGE} is invalid: {error!r}", _RESTORE_WHOLE) from error
    if is_object:
        columns["mm_placeholders"] = {
            modality: [PlaceholderRange(**one) if isinstance(one, Mapping) else one for one in placed]
            for modality, placed in columns["mm_placeholders"].items()
        }
        return MultiModalData(**columns)
    whole = {**data, **columns}
    del whole[LINEAGE]
    return whole


def _restored_rows(
    step: _Step, place: int, modality: str, references: Sequence[Any], kept: Sequence[_Row], read: Sequence[_Step]
) -> Iterator[_Row]:
    if sum(one is None for one in references) != len(kept):
        raise _step_error(step.number, f"its kept {modality} media were edited", _RESTORE_WHOLE)
    left = iter(kept)
    for one in references:
        if one is None:
            yield next(left)
            continue
        number, source, row = one
        holder = step if number is None else read[number]
        rows = holder.tables[source].get(modality, ())
        is_there = step.follows(holder) if number is not None else (place, source) == (_ON_RESPONSE, _ON_TOKENS)
        # Negative numbers would count from the end.
        if not is_there or min(number or 0, source, row) < 0 or row >= len(rows):
            reason = f"the {modality} that step {short_repr(number)} held is missing"
            raise _step_error(step.number, reason, _RESTORE_WHOLE)
        yield rows[row]


def _read_ids(number: int, step: Any) -> tuple[bytes | None, bytes | None]:
    """The prompt ids, and the ids of prompt and completion."""
    for path in _PATHS:
        tokens = _get(step, path)
        prompt, completion = _field(tokens, "prompt_ids"), _field(tokens, "completion_ids")
        if prompt is not None and completion is not None:
            try:
                return _id_bytes(prompt), _id_bytes(prompt) + _id_bytes(completion)
            except (TypeError, ValueError, OverflowError) as error:
                raise _step_error(number, f"its token ids are no ids: {error}", "Pass lists of ints.") from error
    return None, None


def _id_bytes(values: Any) -> bytes:
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{ids.dtype} of shape {ids.shape}")
    return ids.astype(_ID_DTYPE).tobytes()


def _read_table(number: int, data: Any) -> _Table:
    """The three columns of multi-modal data as rows. Raises `TransportError` unless the columns are parallel."""
    if data is not None and not isinstance(data, Mapping | MultiModalData):
        reason = f"its media are a {type(data).__qualname__}"
        raise _step_error(number, reason, f"Pass MultiModalData, or a dict of {', '.join(COLUMNS)}.")
    columns: list[Any] = [_field(data, name) or {} for name in COLUMNS]
    if not all(isinstance(column, Mapping) for column in columns):
        raise _step_error(number, "its columns are not dicts", "Make each a dict from modality to a list.")
    table: _Table = {}
    for modality in dict.fromkeys(modality for column in columns for modality in column):
        lists = [column.get(modality) for column in columns]
        given = [entries for column, entries in zip(columns, lists, strict=True) if modality in column]
        if any(type(entries) not in (list, tuple) for entries in given) or len(set(map(len, given))) != 1:
            reason = f"its {modality} columns are not parallel lists"
            raise _step_error(number, reason, "Give each media item one entry in each column.")
        rows = range(len(given[0]))
        table[modality] = [_Row(*(None if entries is None else entries[row] for entries in lists)) for row in rows]
        for row in table[modality]:
            if not all(isinstance(_field(row.placeholder, name), int | np.integer) for name in ("offset", "length")):
                reason = f"{modality} placeholder {short_repr(row.placeholder)}"
                raise _step_error(number, reason, "Give it an offset and a length.")
    return table


def _field(container: Any, name: str) -> Any:
    """The value of a dict's key or an object's attribute, None if there is none."""
    return container.get(name) if isinstance(container, Mapping) else getattr(container, name, None)


def _get(step: Any, path: Sequence[str]) -> Any:
    for name in path:
        step = _field(step, name)
    return step


def _with_media(step: Any, path: Sequence[str], data: Any) -> Any:
    """A copy of the step with other multi-modal data at `path`: copies the containers on the path, shares the rest."""
    changed = data
    for depth in reversed(range(len(path) + 1)):
        container, name = _get(step, path[:depth]), (*path, MEDIA_KEY)[depth]
        if isinstance(container, Mapping):
            changed = {**container, name: changed}
        else:
            copied = copy.copy(container)
            object.__setattr__(copied, name, changed)  # works on frozen dataclasses and models, too
            changed = copied
    return changed
