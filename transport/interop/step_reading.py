"""Reading the media and token ids of one step of a step list; steps are dicts or objects with attributes.

step["tokens"]["prompt_ids"], ["completion_ids"], ["multi_modal_data"]
step["response"].message.tokens.multi_modal_data
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from renderers.errors import short_repr
from transport.errors import StepMediaError
from transport.interop.same_value import same_value

MEDIA_KEY: Final = "multi_modal_data"
COLUMNS: Final = ("mm_hashes", "mm_placeholders", "mm_items")
TOKENS_PATHS: Final = (("tokens",), ("response", "message", "tokens"))
ON_STEP, ON_RESPONSE = range(2)  # the positions in TOKENS_PATHS

# Keys under which other programs keep media. If these were ignored, the media would be sent in full or be lost.
_WRONG_KEYS: Final = ("mm_data", "multimodal_data", "multi_modal", "multimodal", "multi_modal_inputs", "mm_kwargs")
# Keys that hold media if they are beside token ids, and may hold other things elsewhere.
_WRONG_KEYS_BESIDE_TOKENS: Final = ("mm", "multi_modal_kwargs", "images", "videos", "image_data", "pixel_values")
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
