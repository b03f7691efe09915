"""Each image once: in step lists by token lineage, on a connection by digest."""

from __future__ import annotations

import copy
import dataclasses
import io
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from renderers import MediaItem, MediaSource, Message, MultiModalData, PlaceholderRange
from rollouts import MediaReference, TokenNode, Trajectory, Turn
from rollouts.engines.protocol import FinishReason, WeightSpan
from transport import (
    ChecksumError,
    CompactDecoder,
    CompactEncoder,
    DecodeError,
    EncodeError,
    MalformedError,
    MessageOrderError,
    StepMediaError,
    TruncatedError,
    decode,
    drop_intermediate_multi_modal_data,
    encode,
    restore_multi_modal_data,
)
from transport.interop.same_value import same_value

# Step lists.

PIXELS = {name: np.full((4, 6), ord(name), dtype=np.float32) for name in "ABCDEF"}
IMAGE = 7  # the placeholder token: that of every image
SPAN = 3  # tokens an image takes


def item(name: str) -> dict[str, Any]:
    """The tensors of an image: a copy, as when each step came over a wire of its own."""
    return {"pixel_values": PIXELS[name].copy(), "image_grid_thw": np.array([1, 2, 2])}


def dict_data(placed: list[tuple[str, int]]) -> dict[str, Any]:
    return {
        "mm_hashes": {"image": [name for name, _ in placed]},
        "mm_placeholders": {"image": [{"offset": at, "length": SPAN} for _, at in placed]},
        "mm_items": {"image": [item(name) for name, _ in placed]},
    }


def media_item(name: str) -> MediaItem:
    return MediaItem("image", name, MediaSource.of(name.encode()), item(name), SPAN, None)


def object_data(placed: list[tuple[str, int]]) -> MultiModalData:
    return MultiModalData.from_items((media_item(name), PlaceholderRange(at, SPAN)) for name, at in placed)


def dict_step(prompt: list[int], completion: list[int], placed: list[tuple[str, int]]) -> dict[str, Any]:
    def tokens() -> dict[str, Any]:
        return {"prompt_ids": prompt, "completion_ids": completion, "multi_modal_data": dict_data(placed)}

    return {"tokens": tokens(), "reward": 0.5, "response": {"message": {"role": "assistant", "tokens": tokens()}}}


@dataclass(frozen=True, slots=True)
class Tokens:
    prompt_ids: list[int]
    completion_ids: list[int]
    multi_modal_data: Any


class Reply(pydantic.BaseModel, frozen=True):
    tokens: Any
    content: str = "said"


def object_step(prompt: list[int], completion: list[int], placed: list[tuple[str, int]]) -> Any:
    """As the ecosystem has it: a dict, dicts or dataclasses, and a model for the response."""
    tokens = Tokens(prompt, completion, object_data(placed))
    reply = Reply(tokens=Tokens(list(prompt), list(completion), object_data(placed)))
    return {"tokens": tokens, "response": SimpleNamespace(id="r", message=reply)}


MAKERS = pytest.mark.parametrize("make", [dict_step, object_step])
Maker = Callable[[list[int], list[int], list[tuple[str, int]]], Any]


def reach(container: Any, *path: str) -> Any:
    for name in path:
        container = container.get(name) if isinstance(container, dict) else getattr(container, name, None)
    return container


def on_tokens(step: Any) -> Any:
    return reach(step, "tokens", "multi_modal_data")


def on_response(step: Any) -> Any:
    return reach(step, "response", "message", "tokens", "multi_modal_data")


def hashes(data: Any) -> list[str]:
    return list((reach(data, "mm_hashes") or {}).get("image", []))


def pixels_in(steps: list[Any]) -> Counter[str]:
    """How often each image's data are there, anywhere in the steps, told by their values."""
    found: Counter[str] = Counter()
    for step in steps:
        for data in (on_tokens(step), on_response(step)):
            for one in (reach(data, "mm_items") or {}).get("image", []):
                found[chr(int(one["pixel_values"][0, 0]))] += 1
    return found


def turn(text: str, completion: str = "y") -> tuple[list[int], list[int], list[tuple[str, int]]]:
    """Ids and media of a prompt: a capital letter is an image, any other character a token."""
    ids: list[int] = []
    placed: list[tuple[str, int]] = []
    for letter in text:
        if letter in PIXELS:
            placed.append((letter, len(ids)))
            ids += [IMAGE] * SPAN
        else:
            ids.append(ord(letter))
    return ids, [ord(letter) for letter in completion], placed


def check_exact(steps: list[Any]) -> list[Any]:
    """Drop, prove the inverse and that nothing was touched, and return what was left."""
    before = copy.deepcopy(steps)
    dropped = drop_intermediate_multi_modal_data(steps)
    assert same(steps, before), "the steps given were changed"
    left = copy.deepcopy(dropped)
    assert same(restore_multi_modal_data(dropped), before)
    assert same(dropped, left), "the shortened steps were changed"
    return dropped


def same(one: Any, other: Any) -> bool:
    """Equality written for these tests: types, order, every array value."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, MediaItem):
        return one.mm_hash == other.mm_hash and one.source == other.source and same(one.tensors, other.tensors)
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if hasattr(one, "__dict__"):
        return same(vars(one), vars(other))
    return bool(one == other)


# The four cases, by name.


@MAKERS
def test_a_compaction_that_keeps_a_and_adds_b_keeps_the_data_of_both(make: Maker) -> None:
    dropped = check_exact([make(*turn("sAu")), make(*turn("sAuyv")), make(*turn("zAB"))])
    assert [hashes(on_tokens(step)) for step in dropped] == [["A"], [], ["A", "B"]]


@MAKERS
def test_interleaved_agents_have_each_image_once_per_agent(make: Maker) -> None:
    dropped = check_exact([make(*turn("1A")), make(*turn("2B")), make(*turn("1AyC"))])
    assert [hashes(on_tokens(step)) for step in dropped] == [["A"], ["B"], ["C"]]
    assert pixels_in(dropped) == {"A": 1, "B": 1, "C": 1}


@MAKERS
def test_two_agents_that_show_one_image_have_it_each(make: Maker) -> None:
    dropped = check_exact([make(*turn("1A")), make(*turn("2A")), make(*turn("1Ay")), make(*turn("2Ay"))])
    assert [hashes(on_tokens(step)) for step in dropped] == [["A"], ["A"], [], []]


@MAKERS
def test_a_b_then_b_a_a_keeps_order_and_counts(make: Maker) -> None:
    dropped = check_exact([make(*turn("xAB")), make(*turn("xBAA")), make(*turn("xBAAyB"))])
    assert [hashes(on_tokens(step)) for step in dropped] == [["A", "B"], ["B", "A", "A"], ["B"]]


# What else lineage decides.


@MAKERS
def test_the_copy_on_the_response_is_dropped_too(make: Maker) -> None:
    dropped = check_exact([make(*turn("xA")), make(*turn("xAyB"))])
    assert [hashes(on_response(step)) for step in dropped] == [[], []]
    assert pixels_in(dropped) == {"A": 1, "B": 1}


def test_media_that_are_on_the_response_only_stay_there_and_are_dropped_by_lineage() -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAyB"))]
    for step in steps:
        del step["tokens"]["multi_modal_data"]
    dropped = check_exact(steps)
    assert [hashes(on_response(step)) for step in dropped] == [["A"], ["B"]]
    assert all("multi_modal_data" not in step["tokens"] for step in dropped)


def test_an_image_of_one_size_in_anothers_place_is_kept() -> None:
    dropped = check_exact([dict_step(*turn("xA")), dict_step(*turn("xByC"))])
    assert hashes(on_tokens(dropped[1])) == ["B", "C"]


def test_one_hash_over_other_pixels_is_kept() -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAy"))]
    on_tokens(steps[1])["mm_items"]["image"][0]["pixel_values"][2, 3] += 1
    dropped = check_exact(steps)
    assert hashes(on_tokens(dropped[1])) == ["A"]


def test_items_that_are_none_are_not_filled_with_those_of_the_step_before() -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAy"))]
    on_tokens(steps[1])["mm_items"]["image"] = [None]
    check_exact(steps)


def test_of_two_agents_with_equal_tokens_the_one_that_shows_the_images_is_followed() -> None:
    dropped = check_exact([dict_step(*turn("xA")), dict_step(*turn("xB")), dict_step(*turn("xAyC"))])
    assert hashes(on_tokens(dropped[2])) == ["C"]


def test_the_longest_lineage_is_followed_past_its_pixels() -> None:
    dropped = check_exact(
        [dict_step(*turn("xA")), dict_step(*turn("xB")), dict_step(*turn("xBy")), dict_step(*turn("xAyyC"))]
    )
    assert hashes(on_tokens(dropped[3])) == ["C"]


def test_a_sibling_that_sampled_something_else_keeps_all() -> None:
    dropped = check_exact([dict_step(*turn("xA", "y")), dict_step(*turn("xA", "z")), dict_step(*turn("xAzB"))])
    assert [hashes(on_tokens(step)) for step in dropped] == [["A"], ["A"], ["B"]]


def entries(data: dict[str, Any], chosen: list[int]) -> None:
    """Keep these entries of each column, in this order."""
    for name in ("mm_hashes", "mm_placeholders", "mm_items"):
        data[name]["image"] = [data[name]["image"][index] for index in chosen]


def test_an_image_that_is_announced_past_the_tokens_of_a_step_is_not_carried_by_it() -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAyB"))]
    early, late = on_tokens(steps[0]), on_tokens(steps[1])
    for name in ("mm_hashes", "mm_placeholders", "mm_items"):
        early[name]["image"].append(copy.deepcopy(late[name]["image"][1]))
    dropped = check_exact(steps)
    assert hashes(on_tokens(dropped[1])) == ["B"]


@pytest.mark.parametrize("chosen", [[0, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 1, 2], [3]])
def test_entries_in_any_order_with_gaps_and_repeats_come_back_so(chosen: list[int]) -> None:
    steps = [dict_step(*turn("xABC")), dict_step(*turn("xABCyD"))]
    entries(on_tokens(steps[1]), chosen)
    entries(on_response(steps[1]), chosen[::-1])
    dropped = check_exact(steps)
    assert hashes(on_tokens(dropped[1])) == ["D"] * chosen.count(3)


OTHER_PLACES = [
    ("tokens", "mm_data"),
    ("tokens", "mm_kwargs"),
    ("tokens", "images"),
    ("tokens", "pixel_values"),
    ("tokens", "a name of its own"),
    ("media_of_this_step",),
    ("response", "message", "tokens", "mm_data"),
    ("response", "message", "multimodal_data"),
    ("response", "multi_modal_data"),
    ("multi_modal_data",),
]


@pytest.mark.parametrize("call", [drop_intermediate_multi_modal_data, restore_multi_modal_data])
@pytest.mark.parametrize("path", OTHER_PLACES)
def test_media_in_another_place_are_named_and_not_passed_over(
    path: tuple[str, ...], call: Callable[[Any], Any]
) -> None:
    step = dict_step(*turn("xA"))
    data = on_tokens(step)
    for tokens in (step["tokens"], step["response"]["message"]["tokens"]):
        del tokens["multi_modal_data"]
    container = reach(step, *path[:-1])
    container[path[-1]] = data
    with pytest.raises(StepMediaError, match=f"under {re.escape('.'.join(path))}.*tokens.multi_modal_data") as caught:
        call([dict_step(*turn("x")), step])
    assert caught.value.step == 1
    container[path[-1]] = {}
    call([step])  # nothing is there


@pytest.mark.parametrize("call", [drop_intermediate_multi_modal_data, restore_multi_modal_data])
def test_columns_of_other_names_are_named_and_not_passed_over(call: Callable[[Any], Any]) -> None:
    step = dict_step(*turn("xA"))
    data = on_tokens(step)
    step["tokens"]["multi_modal_data"] = {name.removeprefix("mm_"): column for name, column in data.items()}
    with pytest.raises(StepMediaError, match=r"none of mm_hashes, mm_placeholders, mm_items but .*'hashes'"):
        call([step])


@pytest.mark.parametrize("ids", [[1.5], ["a"], [[1]], "12"])
def test_token_ids_that_are_none_are_no_lineage(ids: Any) -> None:
    with pytest.raises(StepMediaError, match="no ids"):
        drop_intermediate_multi_modal_data([{"tokens": {"prompt_ids": ids, "completion_ids": [1]}}])


def test_steps_without_media_or_tokens_pass_as_they_are() -> None:
    steps = [{"tokens": None}, {"response": None}, dict_step(*turn("x")), {"tokens": {"prompt_ids": [1]}}, None]
    dropped = drop_intermediate_multi_modal_data(steps)
    assert all(one is other for one, other in zip(dropped, steps, strict=True))


def test_a_linear_episode_of_many_steps_holds_each_image_once() -> None:
    steps, text = [], "s"
    for number in range(30):
        text += "ABCDEF"[number % 6] + "u"
        steps.append(dict_step(*turn(text)))
        text += "y"
    dropped = check_exact(steps)
    assert pixels_in(steps).total() == 2 * 30 * 31 / 2
    assert pixels_in(dropped) == dict.fromkeys("ABCDEF", 5)


def test_videos_beside_images_have_columns_of_their_own() -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAyB"))]
    for step in steps:
        for data in (on_tokens(step), on_response(step)):
            data["mm_hashes"]["video"] = ["V"]
            data["mm_placeholders"]["video"] = [{"offset": 0, "length": 1}]
            data["mm_items"]["video"] = [{"frames": np.zeros(2)}]
    dropped = check_exact(steps)
    assert on_tokens(dropped[1])["mm_hashes"] == {"image": ["B"], "video": []}


def test_what_was_dropped_survives_the_codec_and_msgpack() -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAyB"))]
    dropped = drop_intermediate_multi_modal_data(steps)
    assert same(restore_multi_modal_data(decode(encode(dropped))), steps)
    record = on_tokens(dropped[1])["multi_modal_lineage"]
    assert msgpack.unpackb(msgpack.packb(record)) == record


# Refusals.


def test_columns_that_are_not_parallel_name_their_step() -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAyB"))]
    on_tokens(steps[1])["mm_items"]["image"].pop()
    with pytest.raises(StepMediaError, match="step 1: its image columns are not parallel") as caught:
        drop_intermediate_multi_modal_data(steps)
    assert caught.value.step == 1


@pytest.mark.parametrize("column", [[1, 2], 5, "image", {"image": None}, {"image": "text"}, {"image": {0: None}}])
@pytest.mark.parametrize("name", ["mm_hashes", "mm_placeholders", "mm_items"])
def test_columns_that_are_no_lists_by_modality_name_their_step(name: str, column: Any) -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAyB"))]
    on_response(steps[1])[name] = column
    with pytest.raises(StepMediaError, match="step 1: its"):
        drop_intermediate_multi_modal_data(steps)


@pytest.mark.parametrize("lost", ["multi_modal_data", "tokens", "message", "response", "a column"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_steps_that_lack_a_part_come_back_as_they_were(lost: str, which: int) -> None:
    steps = [dict_step(*turn(text)) for text in ("xA", "xAyB", "xAyByA")]
    step = steps[which]
    if lost == "multi_modal_data":
        step["tokens"][lost] = None
    elif lost == "tokens":
        step[lost] = None
    elif lost == "message":
        step["response"][lost] = None
    elif lost == "response":
        step[lost] = None
    else:
        step["tokens"]["multi_modal_data"]["mm_items"] = None
    check_exact(steps)


def test_one_object_for_both_copies_of_the_sidecar_is_shortened_at_both_places() -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAyB"))]
    for step in steps:
        step["response"]["message"]["tokens"] = step["tokens"]
    assert pixels_in(check_exact(steps)) == {"A": 1, "B": 1}


def test_a_turn_that_was_tried_again_keeps_its_images_and_is_followed_once() -> None:
    dropped = check_exact([dict_step(*turn("xA")), dict_step(*turn("xA")), dict_step(*turn("xAyB"))])
    assert [hashes(on_tokens(step)) for step in dropped] == [["A"], ["A"], ["B"]]


def test_data_are_compared_once_for_each_step_that_shows_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counting(one: Any, other: Any) -> bool:
        nonlocal compared
        compared += 1
        return same_value(one, other)

    monkeypatch.setattr("transport.interop.step_media.same_value", counting)
    drop_intermediate_multi_modal_data([dict_step(*turn("x" + "Ay" * shown + "A")) for shown in range(20)])
    assert compared == 19 * 20 / 2 + 20 * 21 / 2, "with the step before, and the two copies of a step with each other"


RUNS: list[Any] = [
    5,
    {},
    {"image": 5},
    {"image": [[7, 0, 1], [0, 0, 1]]},
    {"image": [[1, -1, 1], [0, 0, 1]]},
    {"image": [[1, 0, -1], [0, 0, 1]]},
    {"image": [[1, 0, 10**30], [0, 0, 1]]},
    {"image": [[1, 0, 1], [0, 0, 1], [0, 0, 1]]},
    {"image": [[1, 0, 1], [1, 0, 1], [1, 0, 1]]},
    {"video": [[1, 0, 1]]},
]


@pytest.mark.parametrize("runs", RUNS, ids=repr)
@pytest.mark.parametrize("make", [dict_step, object_step])
def test_a_record_that_does_not_fit_what_was_kept_is_refused(make: Maker, runs: Any) -> None:
    dropped = drop_intermediate_multi_modal_data([make(*turn("xA")), make(*turn("xAyB"))])
    reach(on_tokens(dropped[1]), "multi_modal_lineage")["runs"] = runs
    with pytest.raises(StepMediaError, match="step 1"):
        restore_multi_modal_data(dropped)


def test_dropping_twice_is_refused() -> None:
    dropped = drop_intermediate_multi_modal_data([dict_step(*turn("xA")), dict_step(*turn("xAy"))])
    with pytest.raises(StepMediaError, match="dropped already"):
        drop_intermediate_multi_modal_data(dropped)


@pytest.mark.parametrize("edit", ["removed", "reordered", "media gone", "one medium gone", "record gone bad"])
def test_a_list_that_was_edited_is_not_restored_to_something_else(edit: str) -> None:
    dropped = drop_intermediate_multi_modal_data(
        [dict_step(*turn("1A")), dict_step(*turn("2B")), dict_step(*turn("2By")), dict_step(*turn("1AyC"))]
    )
    if edit == "removed":
        del dropped[1]
    elif edit == "reordered":
        dropped[0], dropped[1] = dropped[1], dropped[0]
    elif edit == "media gone":
        on_tokens(dropped[1])["mm_hashes"] = on_tokens(dropped[1])["mm_placeholders"] = {}
        on_tokens(dropped[1])["mm_items"] = {}
    elif edit == "one medium gone":
        entries(on_tokens(dropped[0]), [])
    else:
        on_tokens(dropped[2])["multi_modal_lineage"]["runs"] = {"image": [["x"]]}
    with pytest.raises(StepMediaError):
        restore_multi_modal_data(dropped)


# Trees of turns.


@dataclass
class Agent:
    text: str
    completion: str = field(default="")


turn_actions = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "extend", "fork", "compact", "new agent", "reorder", "retry"]),
        st.integers(0, 3),  # which agent
        st.text("ABCDEFuvw", max_size=4),
        st.sampled_from(["", "y", "yz"]),
    ),
    max_size=12,
)


def texts(actions: list[tuple[str, int, str, str]]) -> list[tuple[str, str]]:
    """(prompt, completion) of each step that the actions of some agents make."""
    agents = [Agent("s")]
    steps: list[tuple[str, str]] = []
    for action, which, more, completion in actions:
        agent = agents[which % len(agents)]
        if action == "extend":
            agent.text += agent.completion + more
        elif action == "fork":
            agents.append(agent := Agent(agent.text + more))
        elif action == "compact":
            agent.text = "c" + "".join(letter for letter in agent.text if letter in PIXELS)[-3:] + more
        elif action == "new agent":
            agents.append(agent := Agent("n" + more))
        elif action == "reorder":
            agent.text = agent.text[::-1] + more
        agent.completion = completion
        steps.append((agent.text, completion))
    return steps


def introduced(steps: list[tuple[str, str]]) -> Counter[str]:
    """Independently of the code: which images a reader of the list meets for the first time in their lineage.

    In characters, where every token is one: an image is carried if some earlier step's characters, images read as
    placeholders, begin this step's and show it at the same place; of several, the step that carries most.
    """
    counts: Counter[str] = Counter()

    def blind(text: str) -> str:
        return "".join("#" if letter in PIXELS else letter for letter in text)

    for number, (text, _) in enumerate(steps):
        carried: set[int] = set()
        for earlier, said in steps[:number]:
            whole = earlier + said
            if blind(text).startswith(blind(whole)):
                here = {at for at, letter in enumerate(whole) if letter in PIXELS and text[at] == letter}
                carried = max(carried, here, key=len)
        counts.update(letter for at, letter in enumerate(text) if letter in PIXELS and at not in carried)
    return counts


@settings(max_examples=150, deadline=None)
@given(turn_actions, st.sampled_from([dict_step, object_step]))
def test_any_tree_of_turns_is_restored_exactly_and_holds_each_image_once_per_introduction(
    actions: list[tuple[str, int, str, str]], make: Maker
) -> None:
    made = texts(actions)
    dropped = check_exact([make(*turn(*step)) for step in made])
    assert pixels_in(dropped) == introduced(made)


@given(st.lists(st.floats(width=32, allow_nan=True), max_size=4), st.lists(st.floats(width=32), max_size=4))
def test_values_are_the_same_only_bit_for_bit(one: list[float], other: list[float]) -> None:
    left, right = np.array(one, np.float32), np.array(other, np.float32)
    assert same_value({"a": (left, [1])}, {"a": (right, [1])}) == (left.tobytes() == right.tobytes())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        ({0.0: 1}, {-0.0: 1}),
        ({1: "a"}, {True: "a"}),
        (complex(0, -0.0), complex(0, 0.0)),
        (np.ma.array([1, 2], mask=[False, True]), np.ma.array([1, 3], mask=[False, True])),
        (np.ma.array([1, 2], mask=[False, True]), np.ma.array([1, 2], mask=[True, False])),
        (np.zeros(1, ">i2"), np.zeros(1, "<i2")),
    ],
    ids=repr,
)
def test_values_that_are_merely_equal_are_not_the_same(one: object, other: object) -> None:
    assert not same_value(one, other)
    assert not same_value([one], [other])


def test_a_nan_is_the_same_as_one_of_the_same_bits() -> None:
    one, other = (struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0] for _ in range(2))
    assert one is not other
    assert same_value([one], [other])
    assert not same_value([one], [float("nan")])


def test_values_too_deep_to_compare_are_not_the_same() -> None:
    def nested() -> list[Any]:
        inside: list[Any] = []
        for _ in range(5000):
            inside = [inside]
        return inside

    one = nested()
    assert same_value(one, one)
    assert not same_value(one, nested())


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ("a", b"a"), (object(), object())]
)
def test_values_of_other_types_or_orders_are_not_the_same(one: object, other: object) -> None:
    assert not same_value(one, other)
    assert same_value(one, one)


# Connections.

SOURCES = [MediaSource.of(bytes([number]) * 1000) for number in range(6)]


def test_a_source_travels_once_a_connection() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    first, second = sender.encode([SOURCES[0], SOURCES[0]]), sender.encode({"again": SOURCES[0], "new": SOURCES[1]})
    assert first.count(SOURCES[0].data) == 1
    assert SOURCES[0].data not in second
    assert receiver.decode(first) == [SOURCES[0], SOURCES[0]]
    got = receiver.decode(second)
    assert bytes(got["again"].data) == SOURCES[0].data
    assert bytes(got["new"].data) == SOURCES[1].data


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=12), st.integers(0, 6), st.booleans())
def test_any_messages_arrive_within_the_bound(messages: list[list[int]], room: int, framed: bool) -> None:
    sender, receiver = CompactEncoder(1000 * room), CompactDecoder(1000 * room)
    for message in messages:
        obj = [[SOURCES[number] for number in message], np.arange(500)]
        got = receiver.decode_frames(sender.encode_frames(obj)) if framed else receiver.decode(sender.encode(obj))
        assert [bytes(source.data) for source in got[0]] == [SOURCES[number].data for number in message]
        held = receiver._held
        assert sum(source.nbytes for source in held.values()) <= 1000 * room
        assert set(held) == set(sender._held)


def test_the_least_recently_used_source_is_sent_again() -> None:
    sender = CompactEncoder(2000)
    for number in (0, 1, 0, 2):
        sender.encode(SOURCES[number])
    assert SOURCES[0].data not in sender.encode(SOURCES[0])
    assert SOURCES[1].data in sender.encode(SOURCES[1])


def test_what_a_decoder_holds_keeps_no_message_alive() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    message = bytearray(sender.encode([SOURCES[0], np.arange(5000)]))
    got = receiver.decode(message)
    del got
    message.clear()  # raises BufferError while anything looks at it


def test_a_lost_message_is_noticed_and_a_restart_recovers() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    receiver.decode(sender.encode(SOURCES[0]))
    sender.encode(SOURCES[1])
    with pytest.raises(MessageOrderError) as caught:
        receiver.decode(sender.encode([SOURCES[1]]))
    assert (caught.value.expected, caught.value.actual) == (1, 2)
    sender.restart()
    assert receiver.decode(sender.encode([SOURCES[0], SOURCES[1]])) == SOURCES[:2]


def test_a_first_message_that_is_lost_after_a_restart_is_noticed() -> None:
    """The second one's number is the very one that the receiver waits for, on the old connection."""
    sender, receiver = CompactEncoder(), CompactDecoder()
    receiver.decode(sender.encode(SOURCES[0]))
    sender.restart()
    sender.encode("lost")
    for attempt in (sender, CompactEncoder()):
        if attempt is not sender:
            attempt.encode("lost, too")
        with pytest.raises(MessageOrderError, match="another connection") as caught:
            receiver.decode(attempt.encode(SOURCES[0]))
        assert (caught.value.expected, caught.value.actual) == (1, 1)
    sender.restart()
    assert receiver.decode(sender.encode(SOURCES[0])) == SOURCES[0]


def test_sources_of_a_few_bytes_count_as_what_they_take() -> None:
    room = 200
    sender, receiver = CompactEncoder(512 * room), CompactDecoder(512 * room)
    for start in range(0, 1000, 100):
        receiver.decode(sender.encode([MediaSource.of(b"%d" % number) for number in range(start, start + 100)]))
        assert len(receiver._held) <= room
    with pytest.raises(MalformedError, match="max_bytes"):
        CompactDecoder(512 * room).decode(
            CompactEncoder().encode([MediaSource.of(b"%d" % number) for number in range(room + 1)])
        )


def test_a_restart_makes_the_receiver_forget() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    receiver.decode(sender.encode(SOURCES[0]))
    sender.restart()
    receiver.decode(sender.encode(SOURCES[1]))
    assert set(receiver._held) == {SOURCES[1].digest}


def test_a_message_that_fails_late_leaves_the_receiver_as_it_was() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    receiver.decode(sender.encode(SOURCES[0]))
    frames = sender.encode_frames([SOURCES[1]])
    with pytest.raises(DecodeError):
        receiver.decode_frames([*frames[:-1], b"no header"])
    assert set(receiver._held) == {SOURCES[0].digest}
    assert receiver.decode_frames(frames) == [SOURCES[1]]


def test_an_object_that_cannot_be_encoded_changes_nothing() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    with pytest.raises(EncodeError):
        sender.encode([SOURCES[0], object()])
    assert receiver.decode(sender.encode(SOURCES[0])) == SOURCES[0]


def test_a_damaged_source_is_refused_and_the_message_can_be_given_again() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    frames = sender.encode_frames([SOURCES[0]])
    damaged = [bytes(frame) for frame in frames]
    damaged[1] = damaged[1][:-1] + b"!"
    with pytest.raises(ChecksumError):
        receiver.decode_frames(damaged)
    assert receiver.decode_frames(frames) == [SOURCES[0]]


def test_a_sender_cannot_make_a_receiver_hold_more_than_it_allows() -> None:
    with pytest.raises(MalformedError, match="max_bytes is 1500"):
        CompactDecoder(1500).decode(CompactEncoder(5000).encode(SOURCES[:2]))


def test_every_truncation_and_flipped_bit_is_an_error_of_ours_or_harmless() -> None:
    frames = [bytes(frame) for frame in CompactEncoder().encode_frames([SOURCES[0], 1])]
    for size in range(len(frames[0])):
        with pytest.raises((TruncatedError, MalformedError)):
            CompactDecoder().decode_frames([frames[0][:size], *frames[1:]])
    for place in range(len(frames[0])):
        for bit in range(8):
            changed = bytearray(frames[0])
            changed[place] ^= 1 << bit
            try:
                CompactDecoder().decode_frames([bytes(changed), *frames[1:]])
            except DecodeError:
                continue
            assert place in (4, *range(6, 16)), "only padding, an older version, and a connection's name may pass"
    for count in range(len(frames)):
        with pytest.raises(DecodeError):
            CompactDecoder().decode_frames(frames[:count])


# What an episode weighs.


def photograph(seed: int, format: str) -> bytes:
    """512 x 512: smooth shapes under noise, so that it weighs what photographs do."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize(
        (512, 512), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(coarse, np.int16) + random.integers(-12, 13, (512, 512, 3))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, format)
    return file.getvalue()


def episode(format: str, seed: int = 0, calls: int = 20, tokens: int = 1000, sampled: int = 300) -> Trajectory:
    random = np.random.default_rng(seed)
    nodes: list[TokenNode] = []
    turns: list[Turn] = []
    for number in range(calls):
        source = MediaSource.of(photograph(100 * seed + number, format))
        reference = MediaReference("image", f"{source.digest}-fp", source, PlaceholderRange(20, 256))
        asked = tokens - sampled
        nodes.append(
            TokenNode(
                len(nodes) - 1,
                random.integers(0, 150_000, asked, dtype=np.int32),
                np.zeros(asked, bool),
                np.empty(0, np.float32),
                media=(reference,),
            )
        )
        nodes.append(
            TokenNode(
                len(nodes) - 1,
                random.integers(0, 150_000, sampled, dtype=np.int32),
                np.ones(sampled, bool),
                -random.random(sampled, np.float32),
                (WeightSpan("step-12", 0, sampled),),
            )
        )
        message: Message = {"role": "assistant", "content": "x" * 400}
        turns.append(Turn(len(nodes) - 1, FinishReason.STOP, message, 0.1))
    return Trajectory(f"e{seed}", nodes=nodes, turns=turns)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_an_episode_weighs_its_images_and_at_most_14_bytes_a_token(format: str) -> None:
    trajectory = episode(format)
    media = sum(reference.source.nbytes for reference in trajectory.all_media())
    tokens = sum(map(len, trajectory.nodes))
    assert tokens == 20_000
    message = CompactEncoder().encode(trajectory)
    print(f"{format}: {len(message):,} bytes, media {media:,}, {(len(message) - media) / tokens:.2f} bytes a token")
    assert len(message) <= 1.02 * media + 14 * tokens
    assert len(message) - media <= 14 * tokens, "nor more than that without the 2 %"
    got = CompactDecoder().decode(message)
    assert [bytes(reference.source.data) for reference in got.all_media()] == [
        bytes(reference.source.data) for reference in trajectory.all_media()
    ]
