"""Prompts of rows of a data set, with their images and sounds: those that TRL makes of its vision rows."""

import io

import numpy as np
import pytest
from PIL import Image

from rollouts.environments import messages_of_row
from rollouts.errors import ArgumentError
from rollouts.task import Task

RED, BLUE = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
PART = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


VISION_ROWS = {
    "an image before the text": {"prompt": [{"role": "user", "content": "Which?"}], "image": RED},
    "two images before the first text": {
        "prompt": [
            {"role": "system", "content": [text("Be short.")]},
            {"role": "user", "content": "Which?"},
            {"role": "assistant", "content": [text("Red.")]},
            {"role": "user", "content": [text("And?")]},
        ],
        "images": [RED, BLUE],
    },
    "images at their parts": {
        "prompt": [
            {"role": "user", "content": [PART, text("or"), PART]},
            {"role": "assistant", "content": [text("Red.")]},
        ],
        "images": [RED, BLUE],
    },
    "an image that a part has already": {
        "prompt": [{"role": "user", "content": [{"type": "image", "image": BLUE}, PART, text("?")]}],
        "images": [RED],
    },
}


@pytest.mark.parametrize("row", VISION_ROWS.values(), ids=VISION_ROWS)
def test_the_prompt_of_a_vision_row_is_the_one_that_trl_makes(row):
    data_utils = pytest.importorskip("trl.data_utils")
    images = row["images"] if "images" in row else [row["image"]]
    assert messages_of_row(row) == data_utils.prepare_multimodal_messages(row["prompt"], images)
    assert messages_of_row(Task("t", row)) == messages_of_row(row)


def test_a_row_of_a_table_has_its_images_as_files_and_keys_that_are_absent():
    datasets = pytest.importorskip("datasets")
    prompt = [{"role": "user", "content": [PART, text("Which?")]}]
    rows = datasets.Dataset.from_list([{"prompt": prompt, "images": [RED]}])
    decoded = rows.cast_column("images", datasets.List(datasets.Image()))[0]
    assert decoded["prompt"][0]["content"][0] == {"type": "image", "text": None}
    (message,) = messages_of_row(decoded)
    assert np.array_equal(np.asarray(message["content"][0]["image"]), np.asarray(RED))
    assert message["content"][1] == text("Which?")
    (message,) = messages_of_row(rows.cast_column("images", datasets.List(datasets.Image(decode=False)))[0])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(message["content"][0]["image"]))), np.asarray(RED))


def test_text_is_a_message_of_the_user():
    assert messages_of_row({"question": "Why?"}) == [{"role": "user", "content": "Why?"}]
    assert messages_of_row({"question": "Why?", "image": RED}) == [
        {"role": "user", "content": [{"type": "image", "image": RED}, text("Why?")]}
    ]


def test_the_sounds_of_a_row_are_at_their_parts_or_behind_its_images():
    sound, other = ({"array": np.full(8, level, np.float32), "sampling_rate": 16_000} for level in (0, 1))
    audio = {"type": "audio"}
    row = {"prompt": [{"role": "user", "content": [audio, PART, audio]}], "audios": [sound, other], "image": RED}
    (message,) = messages_of_row(row)
    assert message["content"] == [{**audio, "audio": sound}, {**PART, "image": RED}, {**audio, "audio": other}]
    (message,) = messages_of_row({"question": "Who?", "audio": {"bytes": b"RIFF", "path": "a.wav"}, "image": RED})
    assert message["content"] == [{**PART, "image": RED}, {**audio, "audio": b"RIFF"}, text("Who?")]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": [{"role": "user", "content": [PART, PART]}], "images": [RED]}, "1 images.*2 parts"),
        ({"prompt": [{"role": "user", "content": [text("Which?")]}], "image": RED}, "1 images.*0 parts"),
        ({"prompt": [{"role": "user", "content": [PART]}], "image": RED, "audio": b"RIFF"}, "1 sounds.*0 parts"),
    ],
)
def test_another_number_of_images_than_of_parts_names_both_and_the_task(row, found):
    with pytest.raises(ArgumentError, match=found):
        messages_of_row(row)
    with pytest.raises(ArgumentError, match="the row of task 't7' has"):
        messages_of_row(Task("t7", row))
