"""Repeated media are removed from step lists and restored."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_list_makers import (
    PIXELS,
    Maker,
    check_exact,
    dict_step,
    hashes,
    object_step,
    on_response,
    on_tokens,
    pixels_in,
    reach,
    turn,
)

from transport import (
    TransportError,
    drop_intermediate_multi_modal_data,
    restore_multi_modal_data,
)


def test_one_hash_over_other_pixels_is_kept() -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAy"))]
    on_tokens(steps[1])["mm_items"]["image"][0]["pixel_values"][2, 3] += 1
    dropped = check_exact(steps)
    assert hashes(on_tokens(dropped[1])) == ["A"]


def entries(data: dict[str, Any], chosen: list[int]) -> None:
    """Keep these entries of each column, in this order."""
    for name in ("mm_hashes", "mm_placeholders", "mm_items"):
        data[name]["image"] = [data[name]["image"][index] for index in chosen]


@pytest.mark.parametrize("chosen", [[3, 2, 1, 0], [2, 0, 3], [1, 1, 2]])
def test_entries_in_any_order_with_gaps_and_repeats_come_back_so(chosen: list[int]) -> None:
    steps = [dict_step(*turn("xABC")), dict_step(*turn("xABCyD"))]
    entries(on_tokens(steps[1]), chosen)
    entries(on_response(steps[1]), chosen[::-1])
    dropped = check_exact(steps)
    assert hashes(on_tokens(dropped[1])) == ["D"] * chosen.count(3)


def test_media_of_another_kind_are_refused_and_not_passed_over() -> None:
    step = dict_step(*turn("xA"))
    step["tokens"]["multi_modal_data"] = [on_tokens(step)]
    for call in (drop_intermediate_multi_modal_data, restore_multi_modal_data):
        with pytest.raises(TransportError, match="step 1: its media are a list"):
            call([dict_step(*turn("x")), step])


@pytest.mark.parametrize("ids", [[1.5], ["a"], [[1]], "12"])
def test_token_ids_that_are_none_are_no_lineage(ids: Any) -> None:
    with pytest.raises(TransportError, match="no ids"):
        drop_intermediate_multi_modal_data([{"tokens": {"prompt_ids": ids, "completion_ids": [1]}}])


def test_steps_without_media_or_tokens_pass_as_they_are() -> None:
    steps = [{"tokens": None}, {"response": None}, dict_step(*turn("x")), {"tokens": {"prompt_ids": [1]}}, None]
    dropped = drop_intermediate_multi_modal_data(steps)
    assert all(one is other for one, other in zip(dropped, steps, strict=True))


def test_videos_beside_images_have_columns_of_their_own() -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAyB"))]
    for step in steps:
        for data in (on_tokens(step), on_response(step)):
            data["mm_hashes"]["video"] = ["V"]
            data["mm_placeholders"]["video"] = [{"offset": 0, "length": 1}]
            data["mm_items"]["video"] = [{"frames": np.zeros(2)}]
    dropped = check_exact(steps)
    assert on_tokens(dropped[1])["mm_hashes"] == {"image": ["B"], "video": []}


# Refusals.


@pytest.mark.parametrize(
    "column", [[1, 2], 5, "image", {"image": []}, {"image": None}, {"image": "text"}, {"image": {0: None}}]
)
@pytest.mark.parametrize("name", ["mm_hashes", "mm_placeholders", "mm_items"])
def test_columns_that_are_no_lists_by_modality_name_their_step(name: str, column: Any) -> None:
    steps = [dict_step(*turn("xA")), dict_step(*turn("xAyB"))]
    on_response(steps[1])[name] = column
    with pytest.raises(TransportError, match="step 1: its"):
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


RECORDS: list[Any] = [
    5,
    {},
    {"image": 5},
    {"image": [[7, 0, 0], None]},
    {"image": [[1, 0, 0], None]},
    {"image": [[-1, 0, 0], None]},
    {"image": [[None, 0, 0], None]},
    {"image": [[None, 1, 0], None]},
    {"image": [["0", 0, 0], None]},
    {"image": [[0, 2, 0], None]},
    {"image": [[0, -1, 0], None]},
    {"image": [[0, 0, -1], None]},
    {"image": [[0, 0, 10**30], None]},
    {"image": [[0, 0, "0"], None]},
    {"image": [[0, 0], None]},
    {"image": [[0, 0, 0], None, None]},
    {"image": [[0, 0, 0], [0, 0, 0], [0, 0, 0]]},
    {"video": [[0, 0, 0]]},
]


@pytest.mark.parametrize("media", RECORDS, ids=repr)
@pytest.mark.parametrize("make", [dict_step, object_step])
def test_a_record_that_does_not_fit_what_was_kept_is_refused(make: Maker, media: Any) -> None:
    dropped = drop_intermediate_multi_modal_data([make(*turn("xA")), make(*turn("xAyB"))])
    reach(on_tokens(dropped[1]), "multi_modal_lineage")["media"] = media
    with pytest.raises(TransportError, match="step 1"):
        restore_multi_modal_data(dropped)


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
        on_tokens(dropped[2])["multi_modal_lineage"]["media"] = {"image": [["x"]]}
    with pytest.raises(TransportError, match=r"step \d: "):
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
    placeholders, begin this step's and show it at the same place.
    """
    counts: Counter[str] = Counter()

    def blind(text: str) -> str:
        return "".join("#" if letter in PIXELS else letter for letter in text)

    for number, (text, _) in enumerate(steps):
        carried: set[int] = set()
        for earlier, said in steps[:number]:
            whole = earlier + said
            if blind(text).startswith(blind(whole)):
                carried |= {at for at, letter in enumerate(whole) if letter in PIXELS and text[at] == letter}
        counts.update(letter for at, letter in enumerate(text) if letter in PIXELS and at not in carried)
    return counts


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(turn_actions, st.sampled_from([dict_step, object_step]))
def test_any_tree_of_turns_is_restored_exactly_and_holds_each_image_once_per_introduction(
    actions: list[tuple[str, int, str, str]], make: Maker
) -> None:
    made = texts(actions)
    dropped = check_exact([make(*turn(*step)) for step in made])
    assert pixels_in(dropped) == introduced(made)
