"""A TracedStr prints what str prints, and no character loses or changes its origin on the way."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from renderers.template.traced import (
    LoopMark,
    Origin,
    Span,
    TracedStr,
    plain,
    traced_join,
    traced_percent,
    traced_text,
)

# Alphabets that share no character even after a case map, so that a character tells where it came from.
ALPHABETS = {
    None: "abc \n\t,%",
    Origin(0, "content"): "defßİ -\r",
    Origin(1, "content"): "ghiǆ_\u2028",
    Origin(2, "content[0].text"): "jklﬁ.\x0b",
}


@st.composite
def traced(draw: st.DrawFn, max_pieces: int = 4) -> TracedStr:
    """Text of some origins, each in its own alphabet, with a loop mark here and there."""
    text, spans = "", []
    for _ in range(draw(st.integers(0, max_pieces))):
        origin = draw(st.sampled_from(list(ALPHABETS)))
        piece = draw(st.text(ALPHABETS[origin], min_size=1, max_size=5))
        if draw(st.booleans()):
            spans.append(Span(len(text), len(text), LoopMark(1, draw(st.none() | st.integers(0, 3)))))
        if origin is not None:
            spans.append(Span(len(text), len(text) + len(piece), origin))
        text += piece
    return TracedStr(text, spans)


small = st.integers(-7, 12)
bounds = st.none() | small
patterns = st.text("abc ,defßghi-_.", min_size=1, max_size=2)
strings = st.one_of(traced(), st.text("abc ,", max_size=4))
strip_sets = st.none() | st.text("abd g\n-_", max_size=3)


def check(result: Any, expected: Any) -> None:
    """Same text, and spans in range, sorted, without overlap; containers item by item."""
    if isinstance(expected, (list, tuple)):
        assert type(result) is type(expected)
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            check(one, other)
        return
    assert isinstance(result, str)
    assert plain(result) == expected
    position = 0
    for start, end, origin in result.spans if isinstance(result, TracedStr) else ():
        assert position <= start <= end <= len(result)
        assert (start == end) == isinstance(origin, LoopMark)
        position = end


def origins(text: str) -> list[Origin | None]:
    """The origin of each character."""
    found: list[Origin | None] = [None] * len(text)
    for start, end, origin in text.spans if isinstance(text, TracedStr) else ():
        if isinstance(origin, Origin):
            found[start:end] = [origin] * (end - start)
    return found


def alphabet_of(character: str) -> Origin | None:
    return next((origin for origin, alphabet in ALPHABETS.items() if character in alphabet and character != " "), None)


def check_exact(result: Any) -> None:
    """Every character that can be told apart has exactly the origin whose alphabet it is from."""
    if isinstance(result, (list, tuple)):
        for item in result:
            check_exact(item)
        return
    for character, origin in zip(plain(result), origins(result), strict=True):
        if character not in " *\t\n":
            assert origin == alphabet_of(character), (character, origin)


def outcome(call: Any) -> Any:
    """What a call returns, or the type of what it raises."""
    try:
        return call()
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        return type(error)


CUTS: dict[str, tuple[Any, st.SearchStrategy[tuple[Any, ...]]]] = {
    "slice": (lambda s, a, b, c: s[a:b:c], st.tuples(bounds, bounds, bounds.filter(lambda step: step != 0))),
    "index": (lambda s, a: s[a], st.tuples(small)),
    "strip": (lambda s, c: s.strip(c), st.tuples(strip_sets)),
    "rstrip": (lambda s, c: s.rstrip(c), st.tuples(strip_sets)),
    "removeprefix": (lambda s, c: s.removeprefix(c), st.tuples(st.text("abdg", max_size=2))),
    "split": (lambda s, a, n: s.split(a, n), st.tuples(st.none() | patterns | st.just(""), st.integers(-1, 3))),
    "rsplit": (lambda s, a, n: s.rsplit(a, n), st.tuples(st.none() | patterns | st.just(""), st.integers(-1, 3))),
    "split by keyword": (lambda s, n: s.split(maxsplit=n), st.tuples(st.integers(-1, 3))),
    "splitlines": (lambda s, keep: s.splitlines(keep), st.tuples(st.booleans())),
    "partition": (lambda s, c: s.partition(c), st.tuples(patterns | st.just(""))),
    "iterate": (lambda s: list(s), st.tuples()),
    "add": (lambda s, t: s + t, st.tuples(strings)),
    "radd": (lambda s, t: t + s, st.tuples(strings)),
    "mul": (lambda s, n: s * n, st.tuples(st.integers(-1, 3))),
    "join": (lambda s, parts: s.join(parts), st.tuples(st.lists(strings, max_size=3))),
    "replace": (lambda s, a, b, n: s.replace(a, b, n), st.tuples(patterns, strings, st.integers(-1, 3))),
    "percent": (lambda s: "<%s>" % s, st.tuples()),  # noqa: UP031
}


def plain_arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        return plain(arguments)
    if isinstance(arguments, (list, tuple)):
        return type(arguments)(plain_arguments(item) for item in arguments)
    return arguments


@pytest.mark.parametrize("name", CUTS)
@settings(max_examples=40)
@given(data=st.data())
def test_an_operation_that_moves_characters_gives_the_text_of_str_and_keeps_each_origin(
    name: str, data: st.DataObject
) -> None:
    operation, argument_strategy = CUTS[name]
    text, arguments = data.draw(traced()), data.draw(argument_strategy)
    result = outcome(lambda: operation(text, *arguments))
    expected = outcome(lambda: operation(plain(text), *plain_arguments(arguments)))
    if isinstance(expected, type):
        assert result is expected
        return
    check(result, expected)
    check_exact(result)


MAPS: dict[str, Any] = {
    "upper": lambda s: s.upper(),
    "lower": lambda s: s.lower(),
    "title": lambda s: s.title(),
    "capitalize": lambda s: s.capitalize(),
    "center": lambda s: s.center(9, "*"),
    "replace nothing": lambda s: s.replace("", "-"),
    "format": lambda s: f"{s:>12}",
    "percent width": lambda s: "%30s" % s,  # noqa: UP031
    "percent percent": lambda s: (s.replace("%", "%%")) % (),
}


@pytest.mark.parametrize("name", MAPS)
@settings(max_examples=25)
@given(text=traced())
@example(text=TracedStr("dade", [Span(0, 1, Origin(0, "content")), Span(2, 4, Origin(0, "content"))]))
def test_an_operation_that_rewrites_characters_gives_the_text_of_str_and_never_loses_content(
    name: str, text: TracedStr
) -> None:
    result = MAPS[name](text)
    check(result, MAPS[name](plain(text)))
    if any(isinstance(span.origin, Origin) for span in text.spans):
        carried = {character for character in plain(text) if alphabet_of(character) is not None}
        for character, origin in zip(plain(result), origins(result), strict=True):
            if character in carried:
                assert origin is not None, character


# What formatting does with containers.

CONTENT = TracedStr.of("<|im_end|>", Origin(3, "content"))


@pytest.mark.parametrize(
    "value",
    [[CONTENT], (CONTENT,), {"k": CONTENT}, {CONTENT: 1}, {"k": [{"x": CONTENT}]}, {"k": CONTENT}.items(), {CONTENT}],
    ids=["list", "tuple", "value", "key", "nested", "view", "set"],
)
def test_the_text_of_a_container_that_holds_content_is_content(value: Any) -> None:
    for text in (traced_text(value), traced_join("", ["", value]), traced_percent("%s", (value,))):
        assert text == str(value)
        assert origins(text) == [Origin(3, "content")] * len(text)


def test_the_text_of_an_unknown_object_is_never_template_text() -> None:
    class Page:
        def __str__(self) -> str:
            return "<|im_end|>"

    assert origins(traced_text(Page())) == [Origin(-1, "Page")] * len("<|im_end|>")
