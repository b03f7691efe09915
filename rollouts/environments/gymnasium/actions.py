"""Actions of Gymnasium's spaces: their description for a model, and how a completion is read."""

import contextlib
import html
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rollouts.errors import RolloutsError

# What texts have in place of the hyphen: three hyphens, figure dash, en dash, minus, and two compatibility
# forms.
_MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
# A whole word: `(?>` keeps "1.5x" from being read as 1. What goes on as no number does has no value: "0.5.1",
# "5e -1".
_NUMBER = re.compile(
    rf"(?<![\w.])(?>[-+{_MINUS}]?\.?\d+(?:\.+\d+)*(?:\.?[eE^]\s*+[-+{_MINUS}]?\s*+\d+)?)(?!\.?[\w\u207a\u207b])"
)
_DASHES = f"{_MINUS}-\u00ad\u00af\u05be\u207b\u2014\u2015\u2500\u2796\u00b1"
# A word and the first character of its number: no other word and no end of a sentence is between them.
_NEGATIVE = re.compile(r"\b(?:minus|negative|neg\.?)[^\w.!?]*[.\d]\Z", re.IGNORECASE)
# What a sign may have between it and its number: tags, commands of LaTeX; and lines that have only dashes.
_MARKUP = re.compile(
    r"</?[a-zA-Z][^<>]*>|\\(?!minus|neg)[a-zA-Z]++(?:\{(?!minus|neg)\w*\})?|^[ \t]*+[-\u2014]{3}[-\u2014 \t\r]*+(?=\n)",
    re.MULTILINE,
)


def describe_actions(space: Any, action_names: Sequence[str] = ()) -> str:
    """The actions of a `Discrete` or `Box` space in words for the model.

    `action_names` are the names of discrete actions, in order. Raises `RolloutsError` for other spaces, for
    names that are not one for each action, and for a name that is the number of another action.
    """
    kind = kind_of(space)
    if kind == "discrete":
        first, count = int(space.start), int(space.n)
        if action_names:
            _check_names(space, action_names)
            listed = ", ".join(f"{name} ({first + index})" for index, name in enumerate(action_names))
            return f"Answer with one of these actions, by name or number: {listed}."
        return f"Answer with the number of an action, from {first} to {first + count - 1}."
    if kind == "box":
        low, high = space.low.ravel(), space.high.ravel()
        bounds = [f"from {_number(a)} to {_number(b)}" for a, b in zip(low, high, strict=True)]
        if len(bounds) == 1:
            return f"Answer with a number {bounds[0]}."
        if len(set(bounds)) == 1:
            return f"Answer with {len(bounds)} numbers, each {bounds[0]}, separated by commas."
        listed = "; ".join(f"number {index + 1} {text}" for index, text in enumerate(bounds))
        return f"Answer with {len(bounds)} numbers, separated by commas: {listed}."
    raise RolloutsError(f"the action space {space} is neither Discrete nor Box; pass instructions and parse_action")


def parse_action(text: str, space: Any, action_names: Sequence[str] = ()) -> Any:
    """The action in a text: an int of a `Discrete` space, an array of a `Box`.

    A discrete action is a number or a name, whole words regardless of case; the text may have other words,
    but only one action. A name or number within a longer name ("left" in "turn left") does not count. A `Box`
    needs exactly as many finite numbers as it has, within its bounds. A minus, of any Unicode form or an
    entity of HTML, belongs to the number that directly follows it. In a space with negative actions no number
    is read where the text does not say which sign it has: "- 2", "minus 2", "negative: 2", "1-2", "x-2",
    "-<b>2</b>". Raises `ValueError`.
    """
    text = html.unescape(text)
    return _discrete_action(text, space, action_names) if kind_of(space) == "discrete" else _box_action(text, space)


def in_dtype_of(space: Any, action: Any) -> Any:
    """An array in the dtype of a space that can hold it; other actions as they are."""
    dtype = getattr(space, "dtype", None)
    if not isinstance(action, np.ndarray) or action.dtype.kind not in "iuf" or not isinstance(dtype, np.dtype):
        return action
    with np.errstate(over="ignore", invalid="ignore"):
        cast = action.astype(dtype)
    is_same = np.allclose(cast, action) if dtype.kind == "f" else np.array_equal(cast, action)
    return cast if is_same else action


def _discrete_action(text: str, space: Any, action_names: Sequence[str]) -> int:
    first, count = int(space.start), int(space.n)
    found = set()
    for written, index in _outermost(text, space, action_names):
        if index is not None:
            found.add(first + index)
            continue
        value = _value(written)
        if not value.is_integer() or not first <= value < first + count:
            raise ValueError(f"{_shortened(written)} is not the number of an action")
        found.add(int(value))
    if not found:
        raise ValueError("there is no action in the answer")
    if len(found) > 1:
        listed = ", ".join(str(action_names[each - first] if action_names else each) for each in sorted(found))
        raise ValueError(f"there is more than one action in the answer: {listed}")
    return found.pop()


def _outermost(text: str, space: Any, action_names: Sequence[str]) -> Iterator[tuple[str, int | None]]:
    """The names in a text with their index, and the numbers with None, without those within a longer name."""
    spans: list[tuple[int, int, int | None]] = []
    for index, name in enumerate(action_names):
        pattern = rf"(?<!\w){re.escape(html.unescape(name))}(?!\w)"
        spans += [(*match.span(), index) for match in re.finditer(pattern, text, re.IGNORECASE)]
    spans += [(*span, None) for span in _numbers(text, space)]
    # Of those that begin at one place the longest comes first, and of equally long ones the name.
    spans.sort(key=lambda found: (found[0], -found[1], found[2] is None))
    last = 0
    for start, end, named in spans:
        if end > last:
            last = end
            yield text[start:end], named


def _numbers(text: str, space: Any) -> Iterator[tuple[int, int]]:
    """Where the numbers in a text start and end, with what may be a sign on their left."""
    is_signed = bool(np.any((space.start if kind_of(space) == "discrete" else space.low) < 0))
    last = 0
    for match in _NUMBER.finditer(text):
        start, end = match.span()
        if is_signed:
            left = _MARKUP.sub(lambda found: " " * len(found[0]), text[last:start])
            # Between a sign and its number there is neither a word nor the end of an arrow.
            begin = start - len(re.split(r"[\w>]", left)[-1])
            dash = next((place for place in range(begin, start) if left[place - last] in _DASHES), None)
            if word := _NEGATIVE.search(left + text[start]):
                start = last + word.start()
            elif dash is not None:  # with the word that it directly follows: "1-2"
                start = dash - (dash == begin and text[begin - 1 : begin] not in ">")
        yield start, end
        last = end


def _box_action(text: str, space: Any) -> np.ndarray:
    written = [text[start:end] for start, end in _numbers(text, space)]
    numbers = [_value(number) for number in written]
    size = int(np.prod(space.shape))
    if len(numbers) != size:
        raise ValueError(f"the answer has {len(numbers)} numbers; an action has {size}")
    low, high = space.low.ravel(), space.high.ravel()
    for index, number in enumerate(numbers):
        place = f"number {index + 1} of the action is {number:g}, not"
        if np.issubdtype(space.dtype, np.integer) and not number.is_integer():
            raise ValueError(f"{place} an integer")
        # Compared as the bounds are stored: 0.7 is the bound of a float32 box from 0 to 0.7.
        with np.errstate(over="ignore"):
            stored = number if np.issubdtype(space.dtype, np.integer) else space.dtype.type(number)
        if not low[index] <= stored <= high[index]:
            raise ValueError(f"{place} between {_number(low[index])} and {_number(high[index])}")
        if not math.isfinite(stored):  # of a space without bounds
            reason = f"number {index + 1} of the action is {_shortened(written[index])}, too large for {space.dtype}"
            raise ValueError(reason)
    return np.array(numbers).astype(space.dtype).reshape(space.shape)


def kind_of(space: Any) -> str | None:
    """Which of the spaces that `describe_actions` and `parse_action` know this is; None for others."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return "discrete"
    return "box" if isinstance(space, spaces.Box) else None


def _check_names(space: Any, action_names: Sequence[str]) -> None:
    count = int(space.n)
    if len(action_names) != count or len({name.lower() for name in action_names}) != count:
        raise RolloutsError(
            f"the action space {space} has {count} actions and action_names has {list(action_names)}; "
            "pass a different name for each"
        )
    first = int(space.start)
    for index, name in enumerate(action_names):
        number = math.nan
        with contextlib.suppress(ValueError):  # "1^2"
            number = _value(name) if _NUMBER.fullmatch(name) else number
        if first <= number < first + count and number != first + index:
            raise RolloutsError(
                f"the action space {space} has action {first + index} with the name {name!r}, the number of "
                "another action; pass another name"
            )


def _value(written: str) -> float:
    try:
        return float(written.translate(dict.fromkeys(map(ord, _MINUS), "-")))
    except ValueError:
        cure = "write it in digits, with a minus directly before them if it is negative"
        reason = f"it is not clear which number {_shortened(written)} is; {cure}"
        raise ValueError(reason) from None


def _shortened(number: str) -> str:
    return number if len(number) <= 40 else f"{number[:37]}..."


def _number(value: float) -> str:
    if np.isinf(value):
        return "minus infinity" if value < 0 else "infinity"
    return f"{value:g}"
