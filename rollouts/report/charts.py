"""Curves and histograms: the places of the marks of a chart, which the template of the page writes as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from rollouts.terminal.text import counted

_WIDTH, _HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 22, 10, 38  # on the right half of a label, such as 20,000
_RIGHT_EDGE, _BOTTOM_EDGE = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
#: The size and the edges of all drawings, for the template.
EDGES: Final = {
    **{"width": _WIDTH, "height": _HEIGHT},
    **{"left": _LEFT, "right": _RIGHT_EDGE, "top": _TOP, "bottom": _BOTTOM_EDGE},
}
#: Larger numbers cannot be drawn: differences of them have no float.
_MOST: Final = 1e150
_NOTHING_DRAWN: Final = "None of its values can be drawn: each is unknown, infinite, or 1e150 or more."


class Line(NamedTuple):
    """One curve: `ys` at the `xs` of its chart; a number that cannot be drawn is a gap."""

    label: str
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over common `xs`, which ascend, or the bars of one line.

    `names` has a text for each x, for the table, the pointer and the axis of bars.
    """

    title: str
    x_label: str
    xs: Sequence[float]
    lines: Sequence[Line]
    names: Sequence[str] = ()
    note: str = ""
    is_histogram: bool = False


class Mark(NamedTuple):
    """A text at a place of an axis, or of a column of the drawing with its width."""

    place: float
    text: str
    width: float = 0.0


@dataclass(frozen=True, slots=True)
class Drawing:
    """What the template draws. `curves` has for each line its pieces without a gap, each a list of points."""

    chart: Chart
    note: str
    description: str
    rows: Sequence[Sequence[str]]
    y_ticks: Sequence[Mark] = ()
    x_ticks: Sequence[Mark] = ()
    curves: Sequence[Sequence[Sequence[tuple[float, float]]]] = ()
    columns: Sequence[Mark] = ()


def draw(chart: Chart) -> Drawing:
    """The places of a chart's marks; a drawing without marks where none of its values can be drawn."""
    values = [y for line in chart.lines for y in line.ys if abs(y) < _MOST]
    if not values or not all(abs(x) < _MOST for x in chart.xs):
        return Drawing(chart, _NOTHING_DRAWN, "", [])
    too_large = sum(abs(y) >= _MOST for line in chart.lines for y in line.ys)
    left_out = f"{counted(too_large, 'value')} of 1e150 or more cannot be drawn" if too_large else ""
    scale = _Scale.of([0.0, *values] if chart.is_histogram else values)
    at = _places(chart)
    edges = [_LEFT, *(round((a + b) / 2, 1) for a, b in pairwise(at)), _RIGHT_EDGE]
    names = chart.names or [f"{chart.x_label} {value_text(x)}" for x in chart.xs]
    texts = [[value_text(line.ys[index]) for line in chart.lines] for index in range(len(at))]
    labels = [f"{line.label} " if len(chart.lines) > 1 else "" for line in chart.lines]
    return Drawing(
        chart,
        "; ".join(filter(None, [chart.note, left_out])),
        f"From {names[0]} to {names[-1]}. {' '.join(map(_described, chart.lines))}",
        [[name, *cells] for name, cells in zip(names, texts, strict=True)],
        [Mark(scale.y(tick), _tick_text(tick)) for tick in _multiples(scale.low, scale.high, scale.step)],
        [Mark(x, text) for x, text in zip(at[::2], names[::2], strict=True)]
        if chart.is_histogram
        else _x_ticks(chart.xs),
        [_pieces(line, at, scale) for line in chart.lines],
        [
            Mark(left, f"{name}: {', '.join(map(str.__add__, labels, cells))}", round(right - left, 1))
            for (left, right), name, cells in zip(pairwise(edges), names, texts, strict=True)
        ],
    )


def number_text(value: float) -> str:
    """A number with at most four digits that say something."""
    if abs(value) < 1e9 and value == int(value):
        return f"{int(value):,}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def value_text(value: float) -> str:
    """The text of a number, also of one that is infinite or not known."""
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return "not known" if math.isnan(value) else number_text(value)


class _Scale(NamedTuple):
    """The vertical axis."""

    low: float
    high: float
    step: float  # from tick to tick

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        low, high = (0.0 if abs(value) < 1 / _MOST else value for value in (min(values), max(values)))
        if low >= 0 and low < high / 2:
            low = 0.0
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
        step = _round_step(low, high) or high - low
        return cls(math.floor(low / step) * step, math.ceil(high / step) * step, step)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(_BOTTOM_EDGE - share * (_BOTTOM_EDGE - _TOP), 1)


def _round_step(low: float, high: float) -> float:
    """1, 2 or 5 times a power of ten, about 4 of which are the distance; 0 where there is no distance."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return 0.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next((power * factor for factor in (1, 2, 5) if span / (power * factor) <= 4), power * 10)


def _multiples(low: float, high: float, step: float) -> list[float]:
    """The multiples of `step` from `low` to `high`; `low` alone without a step."""
    if not step:
        return [low]
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick_text(tick: float) -> str:
    return f"{tick:,.0f}" if 1e3 <= abs(tick) < 1e6 else f"{tick:.3g}"


def _across(x: float, xs: Sequence[float]) -> float:
    left, right = float(min(xs)), float(max(xs))
    share = (x - left) / (right - left) if right > left else 0.5
    return round(_LEFT + share * (_RIGHT_EDGE - _LEFT), 1)


def _places(chart: Chart) -> list[float]:
    """Where the points are; those of a histogram in the middles of columns of one width."""
    if not chart.is_histogram:
        return [_across(x, chart.xs) for x in chart.xs]
    step = (_RIGHT_EDGE - _LEFT) / len(chart.xs)
    return [round(_LEFT + (index + 0.5) * step, 1) for index in range(len(chart.xs))]


def _x_ticks(xs: Sequence[float]) -> list[Mark]:
    left, right = min(xs), max(xs)
    ticks = [tick for tick in _multiples(left, right, _round_step(left, right)) if left <= tick <= right]
    if len(xs) > 1 and all(float(x).is_integer() for x in xs):  # between two steps is no step
        ticks = [tick for tick in ticks if float(tick).is_integer()]
    return [Mark(_across(tick, xs), value_text(tick)) for tick in ticks]


def _pieces(line: Line, at: Sequence[float], scale: _Scale) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(at, line.ys, strict=True):
        if abs(y) < _MOST:
            pieces[-1].append((x, scale.y(y)))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _described(line: Line) -> str:
    finite = [y for y in line.ys if math.isfinite(y)]
    if not finite:
        return f"{line.label}: no finite value."
    first, last, low, high = map(value_text, (finite[0], finite[-1], min(finite), max(finite)))
    return f"{line.label}: first {first}, last {last}, from {low} to {high}."
