"""Types on the wire: versions, fields that come and go, and names that cannot be taken twice."""

import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport import MalformedError, decode, encode, wire_type
from transport.errors import DecodeError, TransportError
from transport.wire import registry

names = st.lists(st.sampled_from("abcdef"), unique=True)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_by_name", {})
    monkeypatch.setattr(registry, "_by_class", {})


def forget() -> None:
    registry._by_name.clear()
    registry._by_class.clear()


def point(version: int = 1, **fields: Any) -> type:
    cls = dataclasses.make_dataclass("Point", [(n, Any) if d is ... else (n, Any, d) for n, d in fields.items()])
    return wire_type("tests.Point", version)(cls)


@settings(max_examples=60, deadline=None)
@given(names.flatmap(st.permutations), names.flatmap(st.permutations), st.sampled_from([False, True]))
def test_whatever_fields_the_two_sides_have_and_in_whatever_order_values_go_by_name(
    theirs: list[str], ours: list[str], keyword_only: bool
) -> None:
    forget()
    sent = {name: f"{name} of the sender" for name in theirs}
    buffer = encode([point(**dict.fromkeys(theirs))(**sent)] * 2)
    forget()
    fields = [(name, Any, f"{name} by default") for name in ours]
    reader = wire_type("tests.Point")(dataclasses.make_dataclass("Point", fields, kw_only=keyword_only))
    first, second = decode(buffer)
    assert first is second
    assert type(first) is reader
    assert dataclasses.asdict(first) == {name: sent.get(name, f"{name} by default") for name in ours}


def test_fields_go_by_name_and_those_with_init_false_are_not_sent_and_are_computed_again() -> None:
    @wire_type("tests.Mixed")
    @dataclasses.dataclass
    class Mixed:
        a: int
        scale: dataclasses.InitVar[int] = 10
        b: int = 0
        c: int = dataclasses.field(default=0, kw_only=True)
        total: int = dataclasses.field(init=False)

        def __post_init__(self, scale: int) -> None:
            assert scale == 10
            self.total = self.a + self.b

    buffer = encode(Mixed(1, b=2, c=3))
    assert b"total" not in buffer
    assert decode(buffer) == Mixed(1, b=2, c=3)


def test_a_missing_field_without_default_names_type_and_field() -> None:
    buffer = encode(point(x=...)(1))
    forget()
    point(x=..., y=...)
    with pytest.raises(DecodeError) as caught:
        decode(buffer)
    assert "tests.Point was sent without its field 'y'" in str(caught.value)


def test_a_newer_version_is_refused_and_an_older_one_read() -> None:
    buffer = encode(point(2, x=...)(1))
    assert decode(buffer).x == 1
    forget()
    point(3, x=...)
    assert decode(buffer).x == 1
    forget()
    point(1, x=...)
    with pytest.raises(DecodeError) as caught:
        decode(buffer)
    assert "'tests.Point' has version 2 and this installation reads up to 1." in str(caught.value)


def test_values_a_type_refuses_are_an_error_that_keeps_the_reason() -> None:
    buffer = encode(point(x=...)(-1))
    forget()

    @wire_type("tests.Point")
    @dataclasses.dataclass
    class Positive:
        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("x is negative")

    with pytest.raises(MalformedError, match=r"tests\.Point: its constructor raised .*x is negative"):
        decode(buffer)


def test_enums_travel_by_member_name_whatever_their_values() -> None:
    @wire_type("tests.Finish")
    class Finish(enum.StrEnum):
        STOP = "stop"
        LENGTH = "length"

    @wire_type("tests.Level")
    class Level(enum.IntEnum):
        LOW = 1

    back = decode(encode([Finish.STOP, Level.LOW, "stop", 1]))
    assert back[0] is Finish.STOP
    assert back[1] is Level.LOW
    assert [type(plain) for plain in back[2:]] == [str, int]


def test_an_enum_member_this_side_does_not_have_is_named() -> None:
    buffer = encode(wire_type("tests.E")(enum.Enum("E", ["A", "B"])).B)
    forget()
    wire_type("tests.E")(enum.Enum("E", ["A"]))
    with pytest.raises(MalformedError, match=r"tests\.E has no member 'B'\. Declare the same members"):
        decode(buffer)


def test_a_taken_name_and_a_second_name_are_refused_and_the_same_again_is_not() -> None:
    first = point(x=...)
    assert wire_type("tests.Point")(first) is first
    with pytest.raises(TransportError, match=r"Point is registered as 'tests\.Point' version 1\. Choose"):
        point(x=...)
    for name, version in (("tests.Other", 1), ("tests.Point", 2)):
        with pytest.raises(TransportError, match=r"Point is registered as 'tests\.Point' version 1\. Choose"):
            wire_type(name, version)(first)


@pytest.mark.parametrize("cls", [int, type("Plain", (), {}), enum.Flag("F", ["A"])])
def test_only_dataclasses_and_plain_enums_register(cls: type) -> None:
    with pytest.raises(TransportError, match="neither a dataclass nor a named tuple nor a plain enum"):
        wire_type("tests.No")(cls)


def test_a_named_tuple_comes_back_by_field_name() -> None:
    @wire_type("tests.Pair")
    class Pair(NamedTuple):
        a: Any
        b: int = 7

    back = decode(encode([Pair([1], 2), Pair((3, 4))]))
    assert back == [Pair([1], 2), Pair((3, 4))]
    assert type(back[0]) is Pair
    forget()

    @wire_type("tests.Pair")
    class Older(NamedTuple):
        b: int
        c: str = "by default"

    sent = encode(Older(1))
    assert decode(sent) == Older(1)
    forget()
    wire_type("tests.Pair")(Pair)
    with pytest.raises(DecodeError, match="sent without its field 'a'"):
        decode(sent)  # `a` has no default
