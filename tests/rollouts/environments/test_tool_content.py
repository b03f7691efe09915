"""The results of tools as the contents of tool messages."""

import dataclasses
import datetime
import enum
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import BaseModel

from rollouts.environments.tools import ToolFailedError, ToolResultError
from rollouts.environments.tools.tool_content import tool_content

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def content(result, max_characters=1000, max_images=4):
    return tool_content("look", result, max_characters=max_characters, max_images=max_images)


class Point(BaseModel):
    x: int = 1


@dataclasses.dataclass
class Size:
    width: int = 2


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("22 °C", "22 °C"),
        (None, "null"),
        ({"a": [1, "ü"]}, '{"a": [1, "ü"]}'),
        ((1, "a"), '[1, "a"]'),
        (Point(), '{"x": 1}'),
        (Size(), '{"width": 2}'),
        (Colour.RED, '"red"'),
        (datetime.date(2030, 1, 2), '"2030-01-02"'),
        (np.float32(0.5), "0.5"),
        (np.arange(3), "[0, 1, 2]"),
        ({"a": np.eye(2)}, '{"a": [[1.0, 0.0], [0.0, 1.0]]}'),
        ([{"type": "other"}], '[{"type": "other"}]'),
    ],
    ids=str,
)
def test_text_is_passed_on_and_other_values_are_json(value, text):
    assert content(value) == text


def test_content_parts_are_passed_on():
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": PIXELS}]
    assert content(parts) == parts
    assert content(parts[:1]) == "a"


SAMPLES = np.zeros(160, np.float32)


def test_the_file_of_a_video_is_a_video_part_and_samples_without_a_rate_are_numbers():
    film = b"\0\0\0\x14ftypisom" + bytes(8)
    assert content(film) == [{"type": "video", "video": film}]
    assert content(SAMPLES[:2]) == "[0.0, 0.0]"


@pytest.mark.parametrize("sound", [{"array": SAMPLES[:0], "sampling_rate": 1}, {"type": "audio", "audio": SAMPLES[:0]}])
def test_a_sound_without_samples_is_a_failure_that_names_the_tool(sound):
    with pytest.raises(ToolFailedError, match=r"^look returned a sound of 0 samples"):
        content(sound)
    with pytest.raises(ToolFailedError, match=r"^look returned a sound of 0 bytes"):
        content({"type": "audio", "audio": b""})


def test_an_array_of_floats_that_may_be_an_image_is_an_error_that_names_the_tool():
    with pytest.raises(
        ToolResultError, match=r"tool 'look' returned an array \(4, 4, 3\) of float64; an image is uint8"
    ):
        content(PIXELS / 255)


@pytest.mark.parametrize(
    ("image", "size"),
    [
        (Image.new("RGB", (0, 10)), "0x10 pixels"),
        (PIXELS[2:2], "4x0 pixels"),
        (b"", "0 bytes"),
    ],
    ids=["narrow", "flat array", "file"],
)
def test_an_image_without_pixels_is_a_failure_that_names_the_tool_and_the_size(image, size):
    for result in (image, ["before", image], {"type": "image", "image": image}):
        with pytest.raises(ToolFailedError, match=f"^look returned an image of {size}"):
            content(result)


def test_an_integer_that_python_does_not_write_is_a_failure_and_not_a_defect():
    with pytest.raises(ToolFailedError, match=r"^look returned a number of 66439 bits, which is too long to write"):
        content(10**20_000)


def test_images_and_texts_beyond_the_limits_are_left_out_and_counted():
    result = content(["abc", PIXELS, "defg", PIXELS, PIXELS, "h"], max_characters=5, max_images=1)
    assert result == [
        {"type": "text", "text": "abc"},
        {"type": "image", "image": PIXELS},
        {"type": "text", "text": "de"},
        {"type": "text", "text": "\n[3 more characters were left out; 2 more images were left out]"},
    ]


def test_half_a_surrogate_pair_becomes_text_that_can_be_stored():
    assert content("a\ud800") == "a\\ud800"
    assert content(["a\ud800", PIXELS])[0] == {"type": "text", "text": "a\\ud800"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values.filter(lambda value: not isinstance(value, str)))
def test_plain_data_can_be_read_back(value):
    written = content(value, max_characters=10**6)
    assert json.loads(written) == json.loads(json.dumps(value, ensure_ascii=True))


@given(st.lists(st.text() | st.just(PIXELS), max_size=8), st.integers(1, 30), st.integers(1, 4))
def test_results_keep_within_their_limits(result, max_characters, max_images):
    written = content(result, max_characters, max_images)
    parts = [{"type": "text", "text": written}] if isinstance(written, str) else written
    note = 80  # the text that says what was left out
    assert sum(len(part["text"]) for part in parts if part["type"] == "text") <= max_characters + note
    assert sum(part["type"] == "image" for part in parts) <= max_images


@pytest.mark.parametrize("text", [5, None, ["a"], {"a": 1}])
def test_a_text_part_without_text_is_refused_with_its_value(text):
    for result in ({"type": "text", "text": text}, [{"type": "text", "text": text}, "b"]):
        with pytest.raises(ToolResultError, match=r"a text part whose \"text\" is .*; pass a str"):
            content(result)
