"""Messages and parts of usual types are checked in few steps; the result is that of all other types."""

import itertools
from collections import UserDict
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from renderers.errors import MessageError
from renderers.messages import PART_TYPES, ROLES, check_messages
from renderers.process.caches import cache_key


class Text(str):
    """A text of another type than `str`."""


TEXTS = st.sampled_from(["", "x", Text("x")])
VALUES = TEXTS | st.sampled_from([None, 5, b"x", ["x"], {"url": "x"}, [], ()])
KINDS = st.sampled_from([*PART_TYPES, "thinking", "sound", None, 5, Text("text"), ("text",)])
PARTS = st.dictionaries(st.sampled_from(["type", *PART_TYPES, "thinking", "detail"]), VALUES, max_size=3).flatmap(
    lambda part: KINDS.map(lambda kind: {**part, "type": kind}) | st.just(part)
)
CONTENTS = VALUES | st.lists(PARTS | VALUES, max_size=3)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from([*ROLES, "robot", None, 5, Text("user"), ["user"]]), "content": CONTENTS},
    optional={"name": VALUES, "tool_call_id": VALUES, "reasoning_content": VALUES},
)


def checked(message: Any) -> Any:
    """The checked message, or the type and text of the error."""
    try:
        return [list(one.items()) for one in check_messages([message])]
    except MessageError as error:
        return type(error), str(error)


@pytest.mark.slow
@settings(max_examples=500)
@given(message=MESSAGES)
@example(message={"content": [{"text": "x", "type": "text"}, {"type": "image", "image": b"x"}], "role": "user"})
@example(message={"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]})
@example(message={"role": "user", "content": [{"type": "text", "image": b"x"}]})
def test_messages_of_the_usual_types_are_checked_as_those_of_all_others(message: dict[str, Any]) -> None:
    parts = message["content"]
    if isinstance(parts, list):
        parts = [UserDict(part) if isinstance(part, dict) else part for part in parts]
    expected = checked(UserDict({**message, "content": parts}))
    assert checked(message) == expected


def test_a_value_that_holds_itself_has_no_cache_key() -> None:
    value: list[Any] = []
    value.append({"k": (value,)})
    assert cache_key(value) is None


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "file", "file": {"file_id": "f"}}, "files are not supported.*text part.*images"),
        ({"type": "refusal", "refusal": "no"}, 'a refusal is text; send {"type": "text"'),
        ({"type": "input_image", "image_url": "data:"}, 'Responses API; send {"type": "image_url"'),
        ({"type": "image_embeds", "image_embeds": "x"}, "embeddings are not supported"),
        ({"type": "tool_use", "id": "c", "name": "f", "input": {}}, "tool_calls of the assistant"),
        ({"type": "tool_result", "tool_use_id": "c"}, "message of the role tool"),
        ({"type": "mood"}, "unknown part type 'mood'"),
    ],
)
def test_a_part_of_another_api_is_refused_with_what_to_send_instead(part: dict[str, Any], reason: str) -> None:
    text = {"type": "text", "text": "a"}
    with pytest.raises(MessageError, match=f"message 1, part 1: .*{reason}.*is one of text, image") as caught:
        check_messages([{"role": "user", "content": "a"}, {"role": "user", "content": [text, part]}])
    assert (caught.value.message_index, caught.value.part_index) == (1, 1)


def test_a_call_and_its_result_in_the_form_before_tools_become_those_of_today() -> None:
    call = {"name": "run", "arguments": '{"code": "1"}'}
    messages = check_messages(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "run", "content": "R"},
        ]
    )
    assert messages[1:] == [
        {"role": "assistant", "tool_calls": [{"function": call}]},
        {"role": "tool", "name": "run", "content": "R"},
    ]
    with pytest.raises(MessageError, match="only the assistant makes tool calls"):
        check_messages([{"role": "user", "content": "a", "function_call": call}])


@pytest.mark.parametrize("names", [*itertools.permutations(("reasoning_content", "thinking", "reasoning"), 2)])
@pytest.mark.parametrize("empty", ["", None])
def test_reasoning_under_one_name_is_not_lost_to_an_empty_one_under_another(names: Any, empty: Any) -> None:
    message = {"role": "assistant", "content": "a", names[0]: empty, names[1]: "hm"}
    (read,) = check_messages([message])
    assert (read["reasoning_content"], read["thinking"]) == ("hm", "hm")
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
    (read,) = check_messages([{"role": "assistant", "content": parts, names[0]: empty}])
    assert (read["reasoning_content"], read["thinking"]) == ("hm", "hm")
