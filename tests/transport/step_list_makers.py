"""Step lists with images, as dicts and as objects, for tests."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pydantic

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange
from transport import (
    drop_intermediate_multi_modal_data,
    restore_multi_modal_data,
)

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
