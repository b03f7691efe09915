"""Neighbouring objects of one class go as a run, a column a field: by name, shared as they were, all checked."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from handmade import blob, message, ref, root
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers.media.item import MediaSource
from transport import (
    DecodeLimits,
    EncodeError,
    LimitError,
    MalformedError,
    TransportError,
    decode,
    decode_frames,
    encode,
    encode_frames,
    wire_type,
)
from transport.errors import DecodeError
from transport.wire import wire_format


@wire_type("tests.runs.Step")
@dataclasses.dataclass(eq=False, slots=True)
class Step:
    name: Any
    links: Any = None
    data: Any = None


@wire_type("tests.runs.Other")
@dataclasses.dataclass(eq=False)
class Other:
    name: Any
    links: Any = None
    data: Any = None


@wire_type("tests.runs.Strict")
@dataclasses.dataclass(frozen=True)
class Strict:
    low: int
    high: int
    unit: str = "px"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"{self.low} is above {self.high}")


@wire_type("tests.runs.Pair")
@dataclasses.dataclass(frozen=True)
class Pair:
    a: Any
    b: Any


@wire_type("tests.runs.Mood")
class Mood(enum.Enum):
    CALM = 1


def header(value: Any) -> list[Any]:
    """Type table, blob table and entries of a message, read by msgpack alone."""
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(bytes(encode_frames(value)[0])[wire_format.PRELUDE.size :])
    return list(unpacker)


def test_objects_of_one_class_beside_each_other_are_one_entry_with_a_column_for_each_field() -> None:
    steps = [Step("a", 1, np.arange(3)), Step("b", 2, np.arange(4)), Step("c", None, np.arange(2))]
    types, blobs, *entries = header([*steps, Other("d")])
    assert types == [
        ["tests.runs.Step", 1, ["name", "links", "data"], __name__],
        ["tests.runs.Other", 1, ["name", "links", "data"], __name__],
    ]
    assert len(blobs) == 3
    assert entries[0] == [4, 17, ["d", None, None]], "one object is no run"
    assert entries[1] == [1, 16, 3, [["a", "b", "c"], [1, 2, None], 0]], "the arrays are the blobs from 0 on"
    back = decode(encode([*steps, Other("d")]))
    assert [(type(step), step.name, step.links) for step in back] == [
        (Step, "a", 1), (Step, "b", 2), (Step, "c", None), (Other, "d", None)
    ]  # fmt: skip
    assert [step.data.tolist() for step in back[:3]] == [[0, 1, 2], [0, 1, 2, 3], [0, 1]]


def test_arrays_that_stand_elsewhere_too_are_named_one_by_one_and_stay_one_object() -> None:
    one, other = np.arange(3), np.arange(3)
    for shared in ([one, one], [one, other, one], [one, other]):
        back = decode(encode([other, [Step("x", data=array) for array in shared]]))
        arrays = [back[0], *(step.data for step in back[1])]
        sent = [other, *shared]
        assert [[a is b for a in arrays] for b in arrays] == [[a is b for a in sent] for b in sent]


def test_tuples_of_one_element_or_none_stand_in_their_column_and_longer_ones_are_entries() -> None:
    pair = (1, 2)
    steps = [Step("a", ()), Step("b", (Other("x"),)), Step("c", ({"k": (3,)},))]
    assert header(steps)[-2][3][1] == {0: [[], [msgpack.ExtType(1, b"\4")], [{"k": msgpack.ExtType(1, b"\5")}]]}
    back = decode(encode(steps))
    assert [step.links for step in back[::2]] == [(), ({"k": (3,)},)]
    assert type(back[1].links) is tuple
    assert [(type(other), other.name) for other in back[1].links] == [(Other, "x")]
    longer = decode(encode([Step("a", pair), Step("b", (1,)), Step("c", pair)]))
    assert [step.links for step in longer] == [(1, 2), (1,), (1, 2)]
    assert longer[0].links is longer[2].links
    user = decode(encode([Step("a", {0: [[]]}), Step("b", {0: [[], []]})]))
    assert [step.links for step in user] == [{0: [[]]}, {0: [[], []]}], "a dict of the user's is no column"


def test_large_arrays_and_tensors_of_a_run_are_frames_and_those_with_other_values_among_them_go_by_reference() -> None:
    values = [np.arange(5000), np.arange(3), np.zeros((2, 2)), np.array(5)]
    frames = encode_frames([Step(str(n), data=value) for n, value in enumerate(values)])
    assert len(frames) == 2
    for step, value in zip(decode_frames(frames), values, strict=True):
        assert step.data.dtype == value.dtype
        assert np.array_equal(step.data, value)
    mixed = decode(encode([Step("a", data=None), Step("b", data=np.arange(2))]))
    assert mixed[0].data is None
    assert mixed[1].data.tolist() == [0, 1]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 12))
def test_any_graph_of_objects_without_cycles_comes_back_with_every_link_and_nothing_twice(
    data: st.DataObject, count: int
) -> None:
    kinds = data.draw(st.lists(st.sampled_from([Step, Other]), min_size=count, max_size=count))
    nodes: list[Any] = []
    for number, kind in enumerate(kinds):
        links = data.draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        wrap = data.draw(st.sampled_from([list, tuple]))
        nodes.append(kind(number, wrap(nodes[link] for link in links), np.arange(number)))
    top = [nodes[n] for n in data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count))]

    def shape(value: list[Any]) -> list[Any]:
        """Who is met, in order; an object that was met is a number."""
        met: dict[int, int] = {}

        def walk(node: Any) -> Any:
            if id(node) in met:
                return met[id(node)]
            met[id(node)] = len(met)
            links = [walk(link) for link in node.links]
            return [type(node), node.name, type(node.links), links, node.data.tolist()]

        return [walk(node) for node in value]

    assert shape(decode(encode(top))) == shape(top)


def test_an_object_that_others_of_its_run_refer_to_is_one_object_and_media_is_still_asked_for_once() -> None:
    source = MediaSource.of(b"image")
    first = Step("first", data=source)
    second = Step("second", first, source)
    asked: list[str] = []

    def held(media: MediaSource) -> bool:
        asked.append(media.digest)
        return False

    back = decode_frames(encode_frames([first, second, Step("third", [first, second])], omit_media=held))
    assert back[1].links is back[0]
    assert back[2].links == [back[0], back[1]]
    assert asked == [source.digest]


def test_a_cycle_through_a_run_is_named() -> None:
    first, second = Step("first"), Step("second")
    first.links, second.links = second, first
    with pytest.raises(EncodeError, match="contains itself"):
        encode([first, second])


@pytest.mark.parametrize(
    ("links", "says"),
    [
        ([object()], r"value\[2\]\.links\[0\]: .*builtins\.object"),
        ({"a": {("x",): 1}}, r"value\[2\]: dict with a key"),
        (({"a": {("x",): 1}},), r"value\[2\]\.links: dict with a key"),
        ("\ud800", r"value\[2\]: text that is not Unicode"),
        (np.array([object()]), r"value\[2\]\.links: dtype object"),
        ({"a": 2**64}, None),
        ({2**64: 1}, r"value\[2\]: dict with a key .*64 bits"),
    ],
)
def test_what_cannot_be_sent_is_found_within_a_run(links: Any, says: str | None) -> None:
    other = () if isinstance(links, tuple) else None
    steps = [Step(number, other, np.arange(2)) for number in range(2)] + [Step(2, links), Step(3, other)]
    if says is None:
        assert decode(encode(steps))[2].links == links
        return
    with pytest.raises(EncodeError, match=says):
        encode(steps)


def test_an_object_of_a_run_without_one_of_its_fields_is_named() -> None:
    steps = [Step(0), Step(1)]
    del steps[1].links
    with pytest.raises(EncodeError, match=r"value\[1\]: Step without a field: .*links"):
        encode(steps)


def test_runs_that_refer_to_each_other_far_deeper_than_their_objects_do_are_sent() -> None:
    steps: list[Any] = []
    for number in range(1200):
        kind = Step if number % 2 else Other
        steps += [kind((number, 0)), kind((number, 1))]
    for number in range(1199):
        steps[2 * number + number % 2].links = steps[2 * number + 2 + number % 2]  # two of them deep, or three
    back = decode(encode(steps), limits=DecodeLimits(max_depth=6))
    assert [step.name for step in back] == [step.name for step in steps]
    for number in range(1199):
        assert back[2 * number + number % 2].links is back[2 * number + 2 + number % 2]


FIELDS = ["low", "high", "unit", "scale"]


def run(columns: Any, *, fields: Any = FIELDS, name: str = "tests.runs.Strict", **other: Any) -> list[Any]:
    count, first, tag = other.pop("count", 2), other.pop("first", 1), other.pop("tag", 16)
    entries = [[first, tag, count, columns], *other.pop("entries", [root(ref(1))])]
    return message(entries, other.pop("blobs", ()), types=[[name, 1, fields]])


def test_a_run_made_by_hand_is_read() -> None:
    frames = run([[1, 2], [3, 4], ["a", "b"], [0.5, 1.5]], entries=[root([ref(1), ref(2)])])
    assert decode_frames(frames) == [Strict(1, 3, "a", 0.5), Strict(2, 4, "b", 1.5)]


def test_fields_of_a_run_go_by_name_whatever_the_peer_knows() -> None:
    newer = run([[9, 9], [4, 5], ["new", "new"], [1, 2]], fields=["scale", "high", "colour", "low"])
    assert decode_frames(newer) == Strict(1, 4, "px", 9)
    with pytest.raises(DecodeError, match="high"):
        decode_frames(run([[1, 2]] * 3, fields=["low", "unit", "scale"]))


def test_what_one_object_of_a_run_refuses_is_malformed() -> None:
    for fields in (FIELDS, ["high", "low", "unit", "scale"]):
        with pytest.raises(MalformedError, match="above"):
            decode_frames(run([[1, 2], [2, 1], ["", ""], [1, 1]], fields=fields))


GOOD = [[1, 2], [3, 4], ["a", "b"], [0.5, 1.5]]


@pytest.mark.parametrize(
    "frames",
    [
        run(GOOD, count=3),
        run(GOOD, count=1),
        run(GOOD, count=0),
        run([[]] * 4, count=0, entries=[root(None)]),
        run([[]] * 4, count=-1, entries=[root(None)]),
        run(GOOD, count=True),
        run(GOOD, count=2.0),
        run(GOOD, count=None),
        run(GOOD, count=2**63),
        run(GOOD, first="1"),
        run(GOOD, first=None),
        run(GOOD, tag=17),
        run(GOOD, tag=15),
        run(GOOD, tag=1),
        run(GOOD, tag=0),
        run(GOOD, tag="16"),
        run(GOOD, tag=None),
        run(GOOD[:3]),
        run([*GOOD, [1, 2]]),
        run(None),
        run(dict(enumerate(GOOD))),
        run([[1, 2], [3, 4], {0: 1, 1: 2}, [1, 1]]),
        run([[1, 2], [3, 4], {}, [1, 1]]),
        run([[1, 2], [3, 4], {0: [[], []], 1: []}, [1, 1]]),
        run([[1, 2], [3, 4], {1: [[], []]}, [1, 1]]),
        run([[1, 2], [3, 4], {False: [[]]}, [1, 1]]),
        run([[1, 2], [3, 4], {0: [[]]}, [1, 1]]),
        run([[1, 2], [3, 4], {0: [[], None]}, [1, 1]]),
        run([[1, 2], [3, 4], {0: [[], "a"]}, [1, 1]]),
        run([[1, 2], [3, 4], {0: [[], {}]}, [1, 1]]),
        run([[1, 2], [3, 4], {0: "ab"}, [1, 1]]),
        run([[1, 2], [3, 4], {0: None}, [1, 1]]),
        run([[1, 2], [3, 4], "ab", [1, 1]]),
        run([[1, 2], [3, 4], b"ab", [1, 1]]),
        run([[1, 2], [3, 4], None, [1, 1]]),
        run([[1, 2], [3, 4], True, [1, 1]], blobs=([0, b""], [0, b""], [0, b""])),
        run([[1, 2], [3, 4], 1, [1, 1]], blobs=([0, b""], [0, b""])),
        run([[1, 2], [3, 4], -2, [1, 1]], blobs=([0, b""], [0, b""])),
        run([[1, 2], [3, 4], -3, [1, 1]], blobs=([0, b""], [0, b""], [0, b""])),
        run([[1, 2], [3, 4], 2**64 - 1, [1, 1]], blobs=([0, b""], [0, b""])),
        run([[1, 2], [3, 4], 0, [1, 1]]),
        run([[1, 2], [3, 4], blob(), [1, 1]], blobs=([0, b"12345678"],)),
        run(GOOD, entries=[[2, 16, [1, 2, "", 1]], root(None)]),
        run(GOOD, entries=[[2, 16, 2, GOOD], root(None)]),
        run(GOOD, first=0),
        run([[ref(1), 2], [3, 4], ["a", "b"], [1, 1]]),
        run([[ref(2), 2], [3, 4], ["a", "b"], [1, 1]]),
        run(GOOD, entries=[[*root(None), 1]]),
        run([[1, 2], [3, 4]], fields=["a", "b"], name="tests.runs.Pair"),
        run([[1, 2]] * 3, fields=["a", "b", "c"], name="tests.runs.Mood"),
    ],
)
def test_malformed_runs_are_errors(frames: list[Any]) -> None:
    with pytest.raises(MalformedError):
        decode_frames(frames)


SAMPLE = encode_frames(
    [
        [Step("a", (Other(1),), np.arange(3)), Step("b", (), np.arange(2))],
        *(Other(n, (n, n), {"k": [n]}) for n in range(3)),
    ]
)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_a_message_with_runs_changed_anywhere_decodes_or_is_an_error_of_ours(data: st.DataObject) -> None:
    changed = bytearray(SAMPLE[0])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(12, len(changed) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TransportError):
        decode_frames([bytes(changed)])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.integers(-2, 4)
        | st.lists(st.none() | st.integers(0, 3).map(ref) | st.integers(0, 3).map(blob) | st.just([]), max_size=3)
        | st.dictionaries(st.integers(0, 1), st.lists(st.just([]) | st.just([ref(1)]) | st.none(), max_size=3)),
        min_size=2,
        max_size=4,
    ),
    st.integers(-1, 4),
    st.integers(-1, 4),
)
def test_any_columns_are_read_or_an_error_of_ours(columns: list[Any], count: int, first: int) -> None:
    frames = run(
        columns,
        count=count,
        first=first,
        fields=["name", "links", "data"],
        name="tests.runs.Step",
        blobs=([0, b""], [0, b"1234"], [2, b"\0"]),
        entries=[root([ref(1), ref(2)])],
    )
    try:
        back = decode_frames(frames)
    except TransportError:
        return
    assert [type(step) for step in back] == [Step, Step]


def test_what_a_run_refers_to_counts_for_its_depth() -> None:
    frames = run([[1, 2], [3, 4], ["a", "b"], [1, 1]], entries=[[3, 16, [1, 1, ref(2), 1]], root(ref(3))])
    assert decode_frames(frames, limits=DecodeLimits(max_depth=2)).unit == Strict(2, 4, "b", 1)
    with pytest.raises(LimitError, match="max_depth"):
        decode_frames(frames, limits=DecodeLimits(max_depth=1))


def peak_of(frames: list[Any], error: type[Exception] | None) -> int:
    tracemalloc.start()
    try:
        if error is None:
            decode_frames(frames)
        else:
            with pytest.raises(error):
                decode_frames(frames)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("size", [20_000, 45_000, 90_000])
def test_a_run_of_the_shortest_values_costs_no_more_memory_than_the_limit_on_headers_promises(size: int) -> None:
    frames = run([[None] * size] * 3, count=size, fields=["name", "links", "data"], name="tests.runs.Step")
    assert peak_of(frames, None) < 100 * len(frames[0])


@wire_type("tests.runs.Spacious")
@dataclasses.dataclass
class Spacious:
    """What its fields are by default takes far more memory than the message that leaves them out."""

    a: Any = None
    b: Any = None
    c: Any = None
    d: list[int] = dataclasses.field(default_factory=lambda: [0] * 10_000)


@pytest.mark.parametrize("count", [999, 1000, 1001])
def test_objects_of_runs_are_counted_before_they_are_made(count: int) -> None:
    frames = run([[None] * count] * 3, count=count, fields=["a", "b", "c"], name="tests.runs.Spacious")
    limits = DecodeLimits(max_objects=1001)  # the root is one, too
    if count <= 1000:
        decode_frames(frames, limits=limits)
        return
    tracemalloc.start()
    with pytest.raises(LimitError, match="max_objects") as caught:
        decode_frames(frames, limits=limits)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert caught.value.actual == 1002


def test_objects_of_several_runs_and_single_ones_count_together() -> None:
    steps = [["tests.runs.Spacious", 1, ["a", "b", "c"]]]
    entries = [[1 + 10 * n, 16, 10, [[None] * 10] * 3] for n in range(5)]
    frames = message([*entries, [99, 1, []], root(None)], types=steps)
    decode_frames(frames, limits=DecodeLimits(max_objects=52))
    with pytest.raises(LimitError, match="max_objects"):
        decode_frames(frames, limits=DecodeLimits(max_objects=51))


def test_runs_that_share_the_arrays_of_a_few_bytes_are_refused_before_they_are_made() -> None:
    blobs = [[0, b""]] * 10_000
    entries = [[1 + 10_000 * n, 16, 10_000, [0, 0, 0]] for n in range(1000)]
    frames = message([*entries, root(None)], blobs, types=[["tests.runs.Step", 1, ["name", "links", "data"], __name__]])
    assert peak_of(frames, MalformedError) < 80 * len(frames[0])


def test_columns_of_many_unknown_fields_that_share_arrays_are_refused_before_they_are_made() -> None:
    fields = ["name", *(f"x{n}" for n in range(2000))]
    columns = [0] * len(fields)
    frames = message([[1, 16, 5000, columns], root(None)], [[0, b""]] * 5000, types=[["tests.runs.Step", 1, fields]])
    assert peak_of(frames, MalformedError) < 80 * len(frames[0])


def test_the_empty_tuple_takes_three_bytes_wherever_it_stands() -> None:
    assert decode(encode([(), [()], {"a": ()}])) == [(), [()], {"a": ()}]
    assert len(encode_frames([()] * 100)[0]) - len(encode_frames([()] * 90)[0]) == 30
    for data in (b"\0", b"1234"):
        with pytest.raises(MalformedError):
            decode_frames(message([root(msgpack.ExtType(3, data))]))
