"""How the number is read from the answer of a judge."""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from rollouts.errors import ArgumentError, short_repr
from rollouts.values import finite_number

#: How the number is read from an answer (`Judge`).
Parse: TypeAlias = Mapping[str, float] | str | re.Pattern[str] | Callable[[str], Any]


def answer_reader(parse: Parse, bounds: tuple[float, float] | None) -> Callable[[str], float]:
    """A function that reads the number of an answer, or raises ValueError. Raises `ArgumentError`."""
    read = _value_reader(parse)
    low, high = (-math.inf, math.inf) if bounds is None else bounds
    if not low <= high:
        raise ArgumentError("bounds", bounds, "pass the least and the greatest number that is accepted")

    def number(text: str) -> float:
        value = read(text)
        score = finite_number(value)
        if score is None:
            raise ValueError(f"{short_repr(value)} is no finite number")
        if not low <= score <= high:
            raise ValueError(f"{score:g} is not within {low:g} and {high:g}")
        return score

    return number


def _value_reader(parse: Parse) -> Callable[[str], Any]:
    if isinstance(parse, Mapping):
        labels = all(isinstance(label, str) and label.strip() == label != "" for label in parse)
        if not parse or not labels or None in map(finite_number, parse.values()):
            rule = "pass labels, texts without white space around them, each with its finite number"
            raise ArgumentError("parse", parse, rule)
        return partial(_labelled, MappingProxyType(dict(parse)))
    if isinstance(parse, str | re.Pattern):
        pattern = re.compile(parse)
        if "score" not in pattern.groupindex:
            raise ArgumentError("parse", parse, r'name the group of the number: r"Score: (?P<score>\d+)"')
        return partial(_matched, pattern)
    if not callable(parse) or inspect.iscoroutinefunction(parse):
        rule = "pass a dict of labels, a regular expression or a function that is not async"
        raise ArgumentError("parse", parse, rule)
    return parse


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


def _labelled(labels: Mapping[str, float], text: str) -> float:
    line = _last_line(text)
    if line not in labels:
        raise ValueError(f"its last line is none of {', '.join(map(repr, labels))}")
    return labels[line]


def _matched(pattern: re.Pattern[str], text: str) -> float:
    match = pattern.fullmatch(_last_line(text))
    if match is None or match["score"] is None:
        raise ValueError(f"its last line does not match {pattern.pattern!r}, with a score")
    return float(match["score"])
