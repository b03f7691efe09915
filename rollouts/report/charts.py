"""Curves and histograms as inline SVG, each with its numbers as a table.

The SVG has classes and no style: the style sheet of the page colours it for light and dark. A number is shown under
the pointer by the `<title>` of a column as wide as the distance of two points.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from rollouts.terminal.table import counted, printable

# Texts of a run as HTML: every character is visible, none is markup, and none changes the order of others.


# Characters that Python calls printable and that a browser draws as nothing.
_DRAWN_AS_NOTHING: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def escaped(text: str, longest: int = 2000) -> str:
    """`text` as HTML, cut after `longest` characters. Invisible characters are written as `<U+202E>`."""
    cut = text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"
    labelled = _DRAWN_AS_NOTHING.sub(lambda found: f"<U+{ord(found[0]):04X}>", printable(cut))
    return html.escape(labelled)


def number_text(value: float) -> str:
    """A number with at most four digits that say something."""
    if value == int(value) if abs(value) < 1e15 else False:
        return f"{int(value):,}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


_WIDTH, _HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 22, 10, 38  # on the right half of a label, such as 20,000
_RIGHT_EDGE, _BOTTOM_EDGE = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
#: Of a chart of intervals: the height of a row, which has its name above its interval, and how many are drawn.
_ROW: Final = 32
_MOST_INTERVALS: Final = 24
#: A curve of positive numbers over more than this factor is drawn with a logarithmic scale.
_LOGARITHMIC_FROM: Final = 1000.0
_LEAST_POSITIVE: Final = 1e-12
#: Larger numbers cannot be drawn: differences of them have no float.
_MOST: Final = 1e150


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: `ys` at the `xs` of its chart; a number that cannot be drawn is a gap."""

    label: str
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over common `xs`, which ascend. `names` has a text for each x, for the table and the pointer."""

    title: str
    x_label: str
    xs: Sequence[float]
    lines: Sequence[Line]
    names: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram: a share of all for each bin, and a row of figures about it."""

    title: str
    x_label: str
    bins: Sequence[str]
    counts: Sequence[int]
    note: str = ""


class Interval(NamedTuple):
    """A value with the ends of its interval, as a row of a chart; None: it has no interval."""

    label: str
    value: float
    low: float | None
    high: float | None


@dataclass(slots=True)
class Figures:
    """Draws charts; each gets an id of its own."""

    _drawn: int = field(default=0)

    def chart(self, chart: Chart) -> str:
        """The HTML of a chart."""
        drawn = [y for line in chart.lines for y in line.ys if abs(y) < _MOST]
        if not drawn or not all(abs(x) < _MOST for x in chart.xs):
            return _figure_without_points(chart)
        too_large = sum(abs(y) >= _MOST for line in chart.lines for y in line.ys)
        left_out = f"{counted(too_large, 'value')} of 1e150 or more cannot be drawn" if too_large else ""
        note = "; ".join(filter(None, [chart.note, left_out]))
        scale = _Scale.of(drawn)
        left, right = float(min(chart.xs)), float(max(chart.xs))
        width = right - left or 1.0
        at = [_LEFT + (x - left) / width * (_RIGHT_EDGE - _LEFT) for x in chart.xs]
        if len(at) == 1:
            at = [(_LEFT + _RIGHT_EDGE) / 2]
        marks = "".join(_line(line, index, at, scale) for index, line in enumerate(chart.lines))
        body = _y_axis(scale) + _x_axis(chart.xs) + marks + _hover(chart, at)
        rows = [
            [_name(chart, index), *(_value(line.ys[index]) for line in chart.lines)] for index in range(len(chart.xs))
        ]
        headings = [chart.x_label, *(line.label for line in chart.lines)]
        described = " ".join(map(_described, chart.lines))
        describing = f"From {_value(left)} to {_value(right)} ({chart.x_label}). {described}"
        legend = _legend(chart.lines) if len(chart.lines) > 1 else ""
        return self._figure(chart.title, note, chart.x_label, describing, body, legend, headings, rows)

    def bars(self, bars: Bars) -> str:
        """The HTML of a histogram."""
        total = sum(bars.counts)
        shares = [count / total if total else 0.0 for count in bars.counts]
        highest = max(shares, default=0.0) or 1.0
        step = (_RIGHT_EDGE - _LEFT) / max(len(shares), 1)
        scale = _Scale(0.0, highest, False, _round_step(0.0, highest))
        parts = [_y_axis(scale, percent=True)]
        for index, (name, share, count) in enumerate(zip(bars.bins, shares, bars.counts, strict=True)):
            x, y = _LEFT + index * step, scale.y(share)
            parts.append(
                f'<rect class="bar" x="{x + 1:.1f}" y="{y:.1f}" width="{step - 2:.1f}" '
                f'height="{_BOTTOM_EDGE - y:.1f}"/>'
            )
            parts.append(_hit(x, step, f"{name}: {count:,} ({share:.2%})"))
            if index % 2 == 0 or len(shares) < 8:
                parts.append(_text(x + step / 2, _BOTTOM_EDGE + 14, name, "middle"))
        rows = [
            [name, f"{count:,}", f"{share:.2%}"]
            for name, count, share in zip(bars.bins, bars.counts, shares, strict=True)
        ]
        largest = max(range(len(shares)), key=shares.__getitem__, default=0)
        describing = f"{total:,} tokens, most of them in {bars.bins[largest]}." if total else "No tokens."
        headings = [bars.x_label, "tokens", "share"]
        return self._figure(bars.title, bars.note, bars.x_label, describing, "".join(parts), "", headings, rows)

    def intervals(self, title: str, x_label: str, rows: Sequence[Interval]) -> str:
        """The HTML of values with their intervals, a row each, on one axis with 0; empty where none can be drawn."""
        shown = [row for row in rows if all(end is None or abs(end) < _MOST for end in row[1:])][:_MOST_INTERVALS]
        if not shown:
            return ""
        ends = [0.0, *(end for row in shown for end in row[1:] if end is not None)]
        scale = _Scale.of([min(ends), max(ends) if any(ends) else 1.0])
        bottom = _TOP + _ROW * len(shown)
        parts = []
        for tick in scale.ticks():
            x = _across(tick, scale)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
            parts.append(_text(x, bottom + 14, _value(tick), "middle"))
        zero = _across(0.0, scale)
        parts.append(f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        cells = []
        for index, row in enumerate(shown):
            y = _TOP + _ROW * index + _ROW - 8
            interval = "not known"
            if row.low is not None and row.high is not None:
                interval = f"{_value(row.low)} to {_value(row.high)}"
                left, right = (f"{_across(end, scale):.1f}" for end in (row.low, row.high))
                parts.append(f'<polyline class="line l0" points="{left},{y} {right},{y}"/>')
            parts.append(f'<circle class="dot l0" cx="{_across(row.value, scale):.1f}" cy="{y}" r="4"/>')
            parts.append(f'<text class="name" x="4" y="{y - 9}">{escaped(row.label, 60)}</text>')
            described = f"{row.label}: {_value(row.value)}, 95 % interval {interval}"
            parts.append(
                f'<rect class="hit" x="0" y="{_TOP + _ROW * index}" width="{_WIDTH}" height="{_ROW}">'
                f"<title>{escaped(described)}</title></rect>"
            )
            cells.append([row.label, _value(row.value), interval])
        describing = f"{counted(len(shown), 'value')} with 95 % intervals."
        headings = ["figure", x_label, "95 % interval"]
        note = "" if len(shown) == len(rows) else f"{len(shown)} of {len(rows)} figures"
        body, height = "".join(parts), bottom + _HEIGHT - _BOTTOM_EDGE
        return self._figure(title, note, x_label, describing, body, "", headings, cells, height)

    def _figure(
        self,
        title: str,
        note: str,
        x_label: str,
        describing: str,
        body: str,
        legend: str,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        height: int = _HEIGHT,
    ) -> str:
        self._drawn += 1
        name = f"c{self._drawn}"
        axis = _text((_LEFT + _RIGHT_EDGE) / 2, height - 5, x_label, "middle")
        return (
            f'<figure class="chart"><figcaption><h3>{escaped(title)}</h3>{_note(note)}{legend}</figcaption>'
            f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="{name}t {name}d">'
            f'<title id="{name}t">{escaped(title)}</title><desc id="{name}d">{escaped(describing)}</desc>'
            f"{body}{axis}</svg>"
            f"<details><summary>values: {escaped(title)}</summary>{table(headings, rows, title)}</details></figure>\n"
        )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], label: str) -> str:
    """A table in a region that scrolls by itself; cells are texts."""
    head = "".join(f'<th scope="col">{escaped(heading)}</th>' for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", label)


def scrolling(content: str, label: str) -> str:
    """A region that is wider than a narrow page scrolls by itself, also by keyboard."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(label)}">{content}</div>'


@dataclass(frozen=True, slots=True)
class _Scale:
    """The vertical axis."""

    low: float
    high: float
    logarithmic: bool
    step: float = 0.0  # from tick to tick of a linear scale

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        low, high = (0.0 if abs(value) < 1 / _MOST else value for value in (min(values), max(values)))
        if low >= _LEAST_POSITIVE and high / low > _LOGARITHMIC_FROM:
            return cls(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)), True)
        if low >= 0 and low < high / 2:
            low = 0.0
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
        step = _round_step(low, high) or high - low
        return cls(math.floor(low / step) * step, math.ceil(high / step) * step, False, step)

    def y(self, value: float) -> float:
        if self.logarithmic:
            share = math.log(max(value, _LEAST_POSITIVE) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return _BOTTOM_EDGE - share * (_BOTTOM_EDGE - _TOP)

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            return _multiples(self.low, self.high, self.step)
        decades = round(math.log10(self.high / self.low))
        step = max(1, math.ceil(decades / 5))
        return [self.low * 10.0**power for power in range(0, decades + 1, step)]


def _round_step(low: float, high: float, count: int = 4) -> float:
    """1, 2 or 5 times a power of ten, about `count` of which are the distance; 0 where there is no distance."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return 0.0
    power = 10.0 ** math.floor(math.log10(span / count))
    return next((power * factor for factor in (1, 2, 5) if span / (power * factor) <= count), power * 10)


def _multiples(low: float, high: float, step: float) -> list[float]:
    """The multiples of `step` from `low` to `high`; `low` alone without a step."""
    if not step:
        return [low]
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _y_axis(scale: _Scale, *, percent: bool = False) -> str:
    parts = []
    for tick in scale.ticks():
        y = scale.y(tick)
        label = _share_text(tick) if percent else f"{tick:,.0f}" if 1e3 <= abs(tick) < 1e6 else f"{tick:.3g}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT_EDGE}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 5, y + 4, label, "end"))
    return "".join(parts)


def _across(value: float, scale: _Scale) -> float:
    """The place of a value on a horizontal axis over nearly the whole width."""
    return 16 + (value - scale.low) / (scale.high - scale.low) * (_WIDTH - 32)


def _share_text(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or not share else f"{share:.1%}"


def _x_axis(xs: Sequence[float]) -> str:
    left, right = min(xs), max(xs)
    if len(xs) == 1:
        return _text((_LEFT + _RIGHT_EDGE) / 2, _BOTTOM_EDGE + 14, _value(left), "middle")
    span = right - left
    ticks = [tick for tick in _multiples(left, right, _round_step(left, right)) if left <= tick <= right]
    if all(float(x).is_integer() for x in xs):  # between two steps is no step
        ticks = [tick for tick in ticks if float(tick).is_integer()]
    return "".join(
        _text(_LEFT + (tick - left) / span * (_RIGHT_EDGE - _LEFT), _BOTTOM_EDGE + 14, _value(tick), "middle")
        for tick in ticks
    )


def _line(line: Line, index: int, at: Sequence[float], scale: _Scale) -> str:
    pieces: list[list[str]] = [[]]
    for x, y in zip(at, line.ys, strict=True):
        if abs(y) < _MOST:
            pieces[-1].append(f"{x:.1f},{scale.y(y):.1f}")
        elif pieces[-1]:
            pieces.append([])
    drawn = ""
    for points in filter(None, pieces):
        if len(points) == 1:
            x_text, y_text = points[0].split(",")
            drawn += f'<circle class="dot l{index}" cx="{x_text}" cy="{y_text}" r="3"/>'
        else:
            drawn += f'<polyline class="line l{index}" points="{" ".join(points)}"/>'
    return drawn


def _hover(chart: Chart, at: Sequence[float]) -> str:
    """Columns over the whole height; each ends in the middle between two points."""
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(at)), _RIGHT_EDGE]
    parts = []
    for index, (left, right) in enumerate(pairwise(edges)):
        values = ", ".join(
            f"{line.label} {_value(line.ys[index])}" if len(chart.lines) > 1 else _value(line.ys[index])
            for line in chart.lines
        )
        parts.append(_hit(left, right - left, f"{_name(chart, index)}: {values}"))
    return "".join(parts)


def _hit(x: float, width: float, text: str) -> str:
    return (
        f'<rect class="hit" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{_BOTTOM_EDGE - _TOP}">'
        f"<title>{escaped(text)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _legend(lines: Sequence[Line]) -> str:
    entries = "".join(
        f'<li><svg viewBox="0 0 26 8" class="key" aria-hidden="true">'
        f'<polyline class="line l{index}" points="1,4 25,4"/></svg>{escaped(line.label)}</li>'
        for index, line in enumerate(lines)
    )
    return f'<ul class="legend">{entries}</ul>'


def _described(line: Line) -> str:
    finite = [y for y in line.ys if math.isfinite(y)]
    if not finite:
        return f"{line.label}: no finite value."
    first, last, low, high = map(_value, (finite[0], finite[-1], min(finite), max(finite)))
    return f"{line.label}: first {first}, last {last}, from {low} to {high}."


def _figure_without_points(chart: Chart) -> str:
    return (
        f'<figure class="chart"><figcaption><h3>{escaped(chart.title)}</h3>'
        f'<p class="note">None of its values can be drawn: each is unknown, infinite, or 1e150 or more.</p>'
        "</figcaption></figure>\n"
    )


def _note(note: str) -> str:
    return f'<p class="note">{escaped(note)}</p>' if note else ""


def _name(chart: Chart, index: int) -> str:
    return chart.names[index] if chart.names else f"{chart.x_label} {_value(chart.xs[index])}"


def _value(value: float) -> str:
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return "not known" if math.isnan(value) else number_text(value)
