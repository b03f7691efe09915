"""How much one run of a template may do.

A chat template comes with a model, and who wrote it may be anybody. Jinja's sandbox keeps it from Python; it does not
keep it from running without end, or from making a text of a terabyte. So work is counted where it is done: each pass
through a loop and each call, and the characters and items of what an operation is about to make, before it makes it.

One unit is about a byte that is copied; what takes longer costs more. A run starts with far more units than any
conversation of its size needs, so the count decides nothing but whether the run comes to an end. What it cannot see (a
comparison of two long texts) is bounded by the processor time that the units stand for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Self

from renderers.errors import WorkLimitError

#: A pass through a loop, a call, an item that a filter goes over.
STEP = 64
#: A reference in a list that is made.
ITEM = 8
_UNITS = 2**27
# Templates that look through the other messages at each message take a number that grows as the square.
_UNITS_PER_MESSAGE, _UNITS_PER_PAIR = 2**16, 256
# Templates for parts go over a text character by character.
_UNITS_PER_CHARACTER = 512
_SECONDS_PER_UNIT = 5e-7
_UNITS_PER_LOOK = 2**16
# A number of more bits has more than the 4,300 digits that Python prints.
_MOST_BITS = 14_000


class TemplateRun:
    """One run of a template over a conversation: the units that are left, the messages whose loop bodies it entered.

    Within its `with` block, what `spend` counts in this thread is counted for it.
    """

    __slots__ = ("_granted", "_inputs", "_look_at", "_started", "_token", "_units", "entered")

    _token: Token[TemplateRun | None]

    def __init__(self, messages: int = 0, inputs: Sequence[Any] = ()) -> None:
        """`inputs` hold the texts of so many messages; their size is asked for only where units or time run out."""
        self._inputs = inputs
        self._units = self._granted = _UNITS + messages * (_UNITS_PER_MESSAGE + messages * _UNITS_PER_PAIR)
        self._look_at = self._units - _UNITS_PER_LOOK
        self._started = time.thread_time()
        self.entered: list[int] = []

    def __enter__(self) -> Self:
        self._token = _RUNNING.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _RUNNING.reset(self._token)

    @property
    def last_entered(self) -> int | None:
        """The message that the run is at."""
        return self.entered[-1] if self.entered else None

    @property
    def spent(self) -> int:
        return self._granted - self._units

    def spend(self, units: int) -> None:
        """Raise `WorkLimitError` once there are no units left, or no time."""
        self._units -= units
        if self._units < self._look_at:
            self._look()

    def _is_late(self) -> bool:
        return time.thread_time() - self._started > self._granted * _SECONDS_PER_UNIT

    def _look(self) -> None:
        if self._units < 0 or self._is_late():
            more = _UNITS_PER_CHARACTER * sum(map(_characters, self._inputs))
            self._inputs = ()
            self._granted += more
            self._units += more
        if self._units < 0:
            raise WorkLimitError(
                "it makes more text, or goes through its loops more often, than any conversation of this size needs"
            )
        if self._is_late():
            raise WorkLimitError("it takes longer than any conversation of this size needs")
        self._look_at = max(0, self._units - _UNITS_PER_LOOK)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return _characters(list(value)) + _characters(list(value.values()))
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 1


_RUNNING: ContextVar[TemplateRun | None] = ContextVar("run of a template", default=None)


def spend(units: int) -> None:
    """Count work that is about to be done; nothing is counted outside a run (text that no template makes)."""
    run = _RUNNING.get()
    if run is not None:
        run.spend(units)


def check_bits(bits: int) -> None:
    """Raise `WorkLimitError` for an integer of so many bits."""
    if bits > _MOST_BITS:
        raise WorkLimitError("it computes with an integer of more than 4,000 digits")


class InputDict(dict[Any, Any]):
    """A dict of the conversation or the tools, as the caller gave it: a tree, whose size the caller has paid for."""

    __slots__ = ()


class InputList(list[Any]):
    """A list likewise."""

    __slots__ = ()


def spend_on_text_of(value: Any, *_: Any, **__: Any) -> None:
    """Count the text of a value, whatever it holds, before it is made; further arguments are ignored.

    A list may hold another one twice, and that one too: after 40 steps it is short and its text is a terabyte.
    """
    run = _RUNNING.get()
    if run is None:
        return
    if isinstance(value, str):
        run.spend(ITEM + len(value))
    else:
        spend_on_text_times(value, 1)


def spend_on_text_times(value: Any, times: int) -> None:
    """Count the text of a value that is to be there several times."""
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
