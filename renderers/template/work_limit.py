"""The work limit of one run of a template.

A chat template comes with a model, and its author may be anybody. Jinja's sandbox forbids access to Python;
it does not prevent endless loops, or a text of a terabyte. So work is counted: each pass through a loop,
each call, and the characters and items that an operation makes, before it makes them.

One unit is about the cost of copying one byte; slower operations cost more. A run starts with far more
units than any conversation of its size needs, so the limit only stops runs that would not end. Work that is
not counted (the comparison of two long texts) is bounded by the processor time that the units stand for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Self

from renderers.errors import WorkLimitError

#: Units for a pass through a loop, a call, an item that a filter iterates over.
STEP = 64
#: Units for a reference in a new list.
ITEM = 8
_UNITS = 2**27
# Templates that look at all other messages for each message need units in proportion to the square.
_UNITS_PER_MESSAGE, _UNITS_PER_PAIR = 2**16, 256
# Some templates iterate over a text character by character.
_UNITS_PER_CHARACTER = 512
_SECONDS_PER_UNIT = 5e-7
_UNITS_PER_CHECK = 2**16
# Python prints integers of at most 4,300 digits, which are about this many bits.
_MAX_BITS = 14_000


class TemplateRun:
    """One run of a template over a conversation: its remaining units, and the message whose loop body it entered last.

    Inside its `with` block, `spend` takes units from this run, in this thread.
    """

    __slots__ = ("_check_below", "_granted", "_inputs", "_started", "_token", "_units", "last_entered")

    _token: Token[TemplateRun | None]

    def __init__(self, messages: int = 0, inputs: Sequence[Any] = ()) -> None:
        """`messages` is their number; the size of `inputs` is computed when units or time run out."""
        self._inputs = inputs
        self._units = self._granted = _UNITS + messages * (_UNITS_PER_MESSAGE + messages * _UNITS_PER_PAIR)
        self._check_below = self._units - _UNITS_PER_CHECK
        # Set by the first check: reading this clock is a system call, and most runs need no check.
        self._started: float | None = None
        #: The message that the run is printing; None before the first.
        self.last_entered: int | None = None

    def __enter__(self) -> Self:
        self._token = _RUNNING.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _RUNNING.reset(self._token)

    @property
    def spent(self) -> int:
        return self._granted - self._units

    def spend(self, units: int) -> None:
        """Take units; raise `WorkLimitError` when no units or no time is left."""
        self._units -= units
        if self._units < self._check_below:
            self._check()

    def _is_out_of_time(self) -> bool:
        # Of this thread: the time in which others have the processor does not count.
        now = time.thread_time()
        if self._started is None:
            self._started = now
        return now - self._started > self._granted * _SECONDS_PER_UNIT

    def _check(self) -> None:
        if self._units < 0 or self._is_out_of_time():
            # Granted once, and computed only here: most runs never come to the limit.
            more = _UNITS_PER_CHARACTER * sum(map(_characters, self._inputs))
            self._inputs = ()
            self._granted += more
            self._units += more
        if self._units < 0:
            raise WorkLimitError(
                "it makes more text, or runs its loops more often, than any conversation of this size needs"
            )
        if self._is_out_of_time():
            raise WorkLimitError("it takes longer than any conversation of this size needs")
        self._check_below = max(0, self._units - _UNITS_PER_CHECK)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return _characters(list(value)) + _characters(list(value.values()))
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 1


_RUNNING: ContextVar[TemplateRun | None] = ContextVar("run of a template", default=None)


def spend(units: int) -> None:
    """Take units from the running template, none for a negative number; does nothing outside a run."""
    run = _RUNNING.get()
    if run is not None:
        run.spend(max(0, units))


def check_bits(bits: int) -> None:
    """Raise `WorkLimitError` for an integer of so many bits."""
    if bits > _MAX_BITS:
        raise WorkLimitError("it computes with an integer of more than 4,000 digits")


class InputDict(dict[Any, Any]):
    """A dict of the conversation or the tools: its text is no larger than the input, so it is not counted again."""

    __slots__ = ()


class InputList(list[Any]):
    """A list of the conversation or the tools; see `InputDict`."""

    __slots__ = ()


def spend_on_text_of(value: Any, *_: Any, **__: Any) -> None:
    """Count the text of a value before it is made; further arguments are ignored.

    The text is counted and not the items: a list that holds another list twice, which holds another twice,
    ... has few items and, after 40 levels, a text of a terabyte.
    """
    spend_on_text_times(value, 1)


def spend_on_text_times(value: Any, times: int) -> None:
    """Count the text of a value that is repeated `times` times."""
    run = _RUNNING.get()
    if run is None:
        return
    if isinstance(value, str):
        run.spend(times * (ITEM + len(value)))
        return
    before = run.spent
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            run.spend(ITEM + len(item))
            continue
        run.spend(STEP)
        if isinstance(item, Mapping):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += item
    run.spend((times - 1) * (run.spent - before))
