"""Work of the operators and filters whose result may be larger than their input, counted before they run."""

from collections.abc import Sized
from typing import Any

from renderers.errors import WorkLimitError
from renderers.template.traced import TracedStr, traced_join
from renderers.template.work_limit import ITEM, STEP, check_bits, spend, spend_on_text_of, spend_on_text_times

_TEXT = frozenset((str, TracedStr))
_SEQUENCES = (str, bytes, list, tuple)
# The largest width, precision or count that a filter takes.
_LARGEST_NUMBER = 10**6
# Filters whose work does not depend on the size of their input, and those that go through its items.
_WITHOUT_WORK = frozenset(("attr", "count", "d", "default", "first", "last", "length"))
_OF_ITEMS = frozenset(("batch", "dictsort", "groupby", "items", "list", "map", "max", "min", "random", "reject"))
_OF_ITEMS |= {"rejectattr", "select", "selectattr", "slice", "sort", "sum", "unique"}


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


def count_filter(name: str, value: Any, *arguments: Any, **options: Any) -> None:
    """Count the work of a filter before it runs: its arguments without the context or environment that some take."""
    given = (*arguments, *options.values())
    if any(isinstance(each, int) and abs(each) > _LARGEST_NUMBER for each in given):
        raise WorkLimitError(f"it passes the filter {name} a number above {_LARGEST_NUMBER:,}")
    if name == "sum" and any(isinstance(each, list | tuple) for each in given):
        raise WorkLimitError("it sums lists, each partial sum of which is a new list; use a loop")
    if name in _WITHOUT_WORK:
        return
    if name in _OF_ITEMS:
        spend(STEP * (1 + (len(value) if isinstance(value, Sized) else 0)))
    else:
        spend_on_text_times(value, 1 + sum(len(text) for text in given if isinstance(text, str)))
