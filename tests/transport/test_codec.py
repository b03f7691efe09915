"""Objects survive the wire unchanged, arrays are not copied, each image travels once."""

import dataclasses
import datetime as dt
import zoneinfo
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers.media.item import MediaSource
from transport import (
    EncodeError,
    MissingMediaError,
    decode,
    encode,
    encode_frames,
    wire_type,
)


@dataclasses.dataclass
class Node:
    tokens: Any
    extras: Any = None
    next: Any = None


wire_type("tests.codec.Node")(Node)


def test_arrays_from_a_writable_buffer_are_read_only() -> None:
    array = decode(bytearray(encode(np.arange(3))))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_contiguous_array_is_not_copied_into_its_frame_and_another_layout_is() -> None:
    array = np.arange(2400.0).reshape(4, 600)
    _, contiguous, strided = encode_frames([array, array[:, ::2]])
    assert np.shares_memory(np.frombuffer(contiguous, np.uint8), array)
    assert not np.shares_memory(np.frombuffer(strided, np.uint8), array)
    assert memoryview(strided).nbytes == array[:, ::2].nbytes


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 12))
def test_any_graph_of_objects_without_cycles_comes_back_with_every_link_and_nothing_twice(
    data: st.DataObject, count: int
) -> None:
    nodes: list[Any] = []
    for number in range(count):
        links = data.draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        wrap = data.draw(st.sampled_from([list, tuple]))
        nodes.append(Node(np.arange(number), {"number": number}, wrap(nodes[link] for link in links)))
    top = [nodes[n] for n in data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count))]

    def shape(value: list[Any]) -> list[Any]:
        """Who is met, in order; an object that was met is a number."""
        met: dict[int, int] = {}

        def walk(node: Any) -> Any:
            if id(node) in met:
                return met[id(node)]
            met[id(node)] = len(met)
            links = [walk(link) for link in node.next]
            return [node.extras, type(node.next), links, node.tokens.tolist()]

        return [walk(node) for node in value]

    assert shape(decode(encode(top))) == shape(top)


def test_objects_and_arrays_with_two_references_are_one_after_decoding() -> None:
    small, large = np.arange(3), np.arange(1000)
    node = Node(small, large)
    back = decode(encode([small, large, node, small, large, (node,)]))
    assert back[0] is back[3] is back[2].tokens
    assert back[1] is back[4] is back[2].extras
    assert back[5][0] is back[2]
    assert [back[0].tolist(), back[1].tolist()] == [small.tolist(), large.tolist()]


def test_media_the_receiver_holds_is_left_out_and_asked_for() -> None:
    held, sent = MediaSource.of(b"held"), MediaSource.of(b"sent")
    buffer = encode([held, sent], omit_media=lambda source: source.digest == held.digest)
    assert b"held" not in buffer.split(held.digest.encode())[1]
    assert decode(buffer, find_media={held.digest: held}.get) == [held, sent]
    with pytest.raises(MissingMediaError) as caught:
        decode(buffer)
    assert caught.value.digest == held.digest


def chain(length: int) -> Any:
    node: Any = ()
    for _ in range(length):
        node = (node,)
    return node


def looped_list() -> Any:
    loop: list[Any] = [1]
    loop.append(loop)
    return loop


def looped_node() -> Any:
    node = Node(1)
    node.next = {"back": (node,)}
    return node


class Text(str):
    pass


@dataclasses.dataclass(frozen=True)
class Unregistered:
    x: int = 0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Node([Node(1, extras={"a": [object()]})]), r"Node\.tokens\[0\]\.extras\['a'\]\[0\]: .*builtins\.object"),
        ([{"a": Unregistered()}], r"value\[0\]\['a'\]: .*Unregistered.*wire_type"),
        ({"a": {2**64: 1}}, r"value\['a'\]: dict with a key .*64 bits"),
        ([np.array([object()])], r"value\[0\]: dtype object"),
        ([np.zeros(2, "i4,O")], r"value\[0\]: dtype .* holds Python objects"),
        ([np.zeros(2, [(("title", "a"), "i4")])], r"value\[0\]: .*has no name on the wire\. .*one array per field"),
        ([np.ma.masked_array([1, 2])], r"value\[0\]: .*MaskedArray"),
        (
            [np.array(["a"], np.dtypes.StringDType())] if hasattr(np.dtypes, "StringDType") else [object()],
            r"value\[0\]",
        ),
        ({"a": Text("b")}, r"value\['a'\]: .*subclass of str"),
        ([{1, (2, 3)}], r"value\[0\]: set with members of type tuple"),
        (Node([(), {"deep": [{(): 1}]}]), r"Node\.tokens\[1\]\['deep'\]\[0\]: dict with a key"),
        (["\ud800"], r"value\[0\]: text that is not Unicode"),
        (looped_list(), r"value\[1\]: a cycle"),
        (looped_node(), r"Node\.next\['back'\]\[0\]: the object contains itself"),
        (chain(1025), "nested over 1000 deep"),
        ([MediaSource("beef", b"")], r"value\[0\]: media digest"),
        ([dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC"))], "zoneinfo.ZoneInfo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_sent_says_where_it_is_and_what_to_do(value: Any, says: str) -> None:
    with pytest.raises(EncodeError, match=says):
        encode(value)
