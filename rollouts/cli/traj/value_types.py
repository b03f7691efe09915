"""The types of values that have no fixed form, such as the data of tasks, as columns of an Arrow table."""

import json
from collections.abc import Iterator
from typing import Any, Final

_NUMBERS: Final = frozenset({"integer", "number"})
_LARGE: Final = "integer of more than 64 bits"


class ValueType:
    """The type of the values at one place of a column, found from values of JSON by `add`.

    Objects are structs with the keys of all values, absent keys null; integers among other numbers are
    float64. Text of JSON takes the place of the smallest part whose values have no common type (`conflicts`
    names it): where numbers and text occur, for example, integers of more than 64 bits, more than 20
    levels, or an object with a new key after 1,000 keys were found in the column. Of a place without
    values, or with empty objects alone, the type is null.
    """

    def __init__(self, depth: int = 0, keys_left: list[int] | None = None) -> None:
        self._depth = depth
        self._keys_left = [1000] if keys_left is None else keys_left  # shared by all places of the column
        self._kinds: set[str] = set()
        self._fields: dict[str, ValueType] = {}
        self._element: ValueType | None = None

    def add(self, value: Any) -> None:
        """Take a value into account: None, a boolean, a number, text, a list, or a dict with text as keys."""
        if value is None or value == {}:
            return
        self._kinds.add(_kind(value))
        if isinstance(value, dict | list) and self._depth == 20:
            self._kinds.add("more levels")
        if self._is_json:
            self._fields, self._element = {}, None
        elif isinstance(value, dict):
            self._add_fields(value)
        elif isinstance(value, list):
            self._element = self._element or ValueType(self._depth + 1, self._keys_left)
            for each in value:
                self._element.add(each)

    def _add_fields(self, value: dict[str, Any]) -> None:
        new = value.keys() - self._fields.keys()
        if len(new) > self._keys_left[0]:
            self._kinds.add("more keys")
            self._fields = {}
            return
        self._keys_left[0] -= len(new)
        for key, each in value.items():
            if key not in self._fields:
                self._fields[key] = ValueType(self._depth + 1, self._keys_left)
            self._fields[key].add(each)

    @property
    def _is_json(self) -> bool:
        return (len(self._kinds) > 1 and not self._kinds <= _NUMBERS) or _LARGE in self._kinds

    def conflicts(self, place: str) -> Iterator[str]:
        """A line for each place below `place`, and for itself, whose values are text of JSON."""
        if self._is_json:
            yield f"{place}: {', '.join(sorted(self._kinds))}"
            return
        for name, field in self._fields.items():
            yield from field.conflicts(f"{place}.{name}")
        if self._element is not None:
            yield from self._element.conflicts(f"{place}[]")

    def arrow(self, pyarrow: Any) -> Any:
        """The type as one of `pyarrow`, the module."""
        if self._is_json or "text" in self._kinds:
            return pyarrow.string()
        if self._fields:
            return pyarrow.struct({name: field.arrow(pyarrow) for name, field in self._fields.items()})
        if self._element is not None:
            return pyarrow.list_(self._element.arrow(pyarrow))
        if self._kinds == {"boolean"}:
            return pyarrow.bool_()
        if self._kinds == {"integer"}:
            return pyarrow.int64()
        return pyarrow.float64() if self._kinds else pyarrow.null()

    def fitted(self, value: Any) -> Any:
        """One of the values that were added, in the form that `pyarrow` takes for the type."""
        if value is None or value == {}:
            return None
        if self._is_json:
            return json.dumps(value)
        if isinstance(value, dict):
            return {name: self._fields[name].fitted(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._element.fitted(each) if self._element is not None else None for each in value]
        return float(value) if self._kinds == _NUMBERS else value


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -(2**63) <= value < 2**63 else _LARGE
    kinds = {float: "number", str: "text", list: "list", dict: "object"}
    return kinds[type(value)]
