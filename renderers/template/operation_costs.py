"""Work of the operators and filters whose result may be larger than their input, counted before they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any

from renderers.errors import WorkLimitError
from renderers.template.traced import TracedStr, traced_join
from renderers.template.work_limit import ITEM, STEP, check_bits, spend, spend_on_text_of, spend_on_text_times

_TEXT = frozenset((str, TracedStr))
_SEQUENCES = (str, bytes, list, tuple)
# The longest `range` of the sandbox: about the most items of a value without a length.
_MAX_RANGE = 100_000


def added(terms: list[Any]) -> Any:
    """`a + b + c`."""
    if _TEXT.issuperset(map(type, terms)):
        return traced_join("", terms)
    total = terms[0]
    for term in terms[1:]:
        if isinstance(total, _SEQUENCES) and isinstance(term, _SEQUENCES):
            # The text of the longer operand was counted when a loop collected its items.
            spend(ITEM * (len(total) + len(term)))
            spend_on_text_of(min(total, term, key=len))
        total = total + term
    return total


def multiplied(left: Any, right: Any) -> Any:
    """`left * right`."""
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, _SEQUENCES) and isinstance(times, int):
            spend_on_text_times(repeated, max(1, times))
    return left * right


def raised_to(base: Any, exponent: Any) -> Any:
    """`base ** exponent`."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and abs(base) > 1:
        check_bits(base.bit_length() * exponent)
    return base**exponent


def listed(made: Any) -> Any:
    """A list, tuple or dict literal that holds variables."""
    spend_on_text_of(made)
    return made


def sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """`value[start:stop:step]`."""
    part = value[start:stop:step]
    if isinstance(part, Sized):
        spend(ITEM * len(part))
    return part


# Filters: their arguments without the context or environment that some take first.


def _items(value: Any, *_: Any, **__: Any) -> None:
    """Filters that iterate over a value."""
    spend(STEP * (1 + (len(value) if isinstance(value, Sized) else 0)))


def _nothing(*_: Any, **__: Any) -> None:
    """Filters whose work does not depend on the size of their input."""


def _width(value: Any, width: int = 80) -> None:
    spend_on_text_of(value)
    spend(width)


def _round(_: Any, precision: int = 0, *__: Any) -> None:
    if isinstance(precision, int):
        check_bits(4 * abs(precision))


def _batch(value: Any, linecount: int, fill_with: Any = None) -> None:
    _items(value)
    spend_on_text_times(fill_with, max(1, linecount))


def _map(value: Any, *_: Any, **options: Any) -> None:
    _items(value)
    if "default" in options:
        spend_on_text_times(options["default"], len(value) if isinstance(value, Sized) else _MAX_RANGE)


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    _items(value)
    if isinstance(start, Sequence):  # each partial sum is a new, longer list
        if not isinstance(value, Sequence) or attribute is not None:
            raise WorkLimitError("it sums lists from a generator or attribute; make a list of them first")
        spend(ITEM * len(value) * sum(len(item) for item in value if isinstance(item, Sized)))


def _wordwrap(
    value: Any, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, *_: Any
) -> None:
    spend_on_text_times(value, 1 + len(wrapstring or ""))


def _urlize(value: Any, *arguments: Any, **options: Any) -> None:
    more = sum(len(text) for text in (*arguments, *options.values()) if isinstance(text, str))
    spend_on_text_times(value, 2 + more)


#: The function that counts the work of a filter before it runs; of any other filter, the text of its input is counted.
FILTER_COSTS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("attr", "count", "d", "default", "first", "last", "length"), _nothing),
    **dict.fromkeys(("dictsort", "groupby", "items", "list", "max", "min", "random", "reject", "rejectattr"), _items),
    **dict.fromkeys(("select", "selectattr", "sort", "unique"), _items),
    "batch": _batch,
    "center": _width,
    "map": _map,
    "round": _round,
    "slice": _batch,
    "sum": _sum,
    "urlize": _urlize,
    "wordwrap": _wordwrap,
}
