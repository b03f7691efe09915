"""Values that consumers send between processes: pickles, copies, pydantic fields, msgpack."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import corpus
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from spelling import ids_of

from renderers import (
    MediaPolicy,
    MultiModalData,
    PlaceholderRange,
    Qwen3VLRendererConfig,
    RenderedTokens,
    RenderedTrainingSample,
    RendererOptions,
    TemplateRenderer,
    build_training_sample,
)

IMAGE = {"type": "image", "image": np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)}
CONVERSATION = [corpus.user([IMAGE]), {"role": "assistant", "content": "A"}]


@pytest.fixture(scope="module")
def rendered(renderer: TemplateRenderer) -> RenderedTokens:
    return renderer.render(CONVERSATION)


@pytest.fixture(scope="module")
def values(renderer: TemplateRenderer, rendered: RenderedTokens) -> dict[str, Any]:
    media = rendered.multi_modal_data
    assert media is not None
    called = ids_of(renderer, "<tool_call>", '{"name": "look", "arguments": {"n": 1}}', "</tool_call>", "<|im_end|>")
    parsed = renderer.parse_response(called)
    return {
        "RenderedTokens": rendered,
        "MultiModalData": media,
        "PlaceholderRange": media.mm_placeholders["image"][0],
        "MediaItem": media.media_items["image"][0],
        "ProcessorOutput": media.mm_items["image"][0],
        "ParsedResponse": parsed,
        "ParsedToolCall": parsed.tool_calls[0],
        "ToolCallParseStatus": parsed.tool_calls[0].status,
        "RenderedTrainingSample": build_training_sample(renderer, CONVERSATION),
        "RendererOptions": RendererOptions(chat_template_kwargs={"x": 1}),
        "Qwen3VLRendererConfig": Qwen3VLRendererConfig(add_vision_id=True),
        "MediaPolicy": MediaPolicy(),
        "Format": renderer.format,
    }


NAMES = (
    "RenderedTokens", "MultiModalData", "PlaceholderRange", "MediaItem", "ProcessorOutput", "ParsedResponse",
    "ParsedToolCall", "ToolCallParseStatus", "RenderedTrainingSample", "RendererOptions", "Qwen3VLRendererConfig",
    "MediaPolicy", "Format",
)  # fmt: skip
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle 2": lambda value: pickle.loads(pickle.dumps(value, 2)),
    "pickle 5": lambda value: pickle.loads(pickle.dumps(value, 5)),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_value_equals_its_pickle_and_its_copy(values: dict[str, Any], name: str, how: str) -> None:
    twin = COPIES[how](values[name])
    assert type(twin) is type(values[name])
    assert twin == values[name]


class Step(BaseModel):
    """Fields of a consumer's model."""

    tokens: RenderedTokens
    media: MultiModalData | None = None
    sample: RenderedTrainingSample | None = None


def test_a_field_of_a_pydantic_model_keeps_the_instance_and_is_written_as_columns(
    rendered: RenderedTokens, values: dict[str, Any]
) -> None:
    step = Step(tokens=rendered, media=rendered.multi_modal_data, sample=values["RenderedTrainingSample"])
    assert step.tokens is rendered
    assert pickle.loads(pickle.dumps(step)) == step
    dumped = step.model_dump()
    assert {"token_ids", "message_indices", "sampled_mask", "is_content", "message_roles"} <= dumped["tokens"].keys()
    read = Step.model_validate(dumped)
    assert (read.tokens.token_ids, read.tokens.spans) == (rendered.token_ids, rendered.spans)
    assert read.tokens.message_roles == rendered.message_roles
    assert read.media is not None
    assert rendered.multi_modal_data is not None
    assert read.media.mm_hashes == rendered.multi_modal_data.mm_hashes
    assert np.array_equal(read.media.mm_items["image"][0]["pixel_values"], values["ProcessorOutput"]["pixel_values"])


@given(
    columns=st.lists(st.tuples(st.integers(-1, 3), st.booleans(), st.booleans()), max_size=20),
    names=st.lists(st.one_of(st.none(), st.text()), max_size=4),
)
def test_tokens_without_media_survive_json(columns: list[tuple[int, bool, bool]], names: list[str | None]) -> None:
    indices, sampled, content = (list(column) for column in zip(*columns, strict=True)) if columns else ([], [], [])
    tokens = RenderedTokens(
        list(range(len(columns))), message_roles=["user"] * 4, message_tool_names=names, message_indices=indices,
        sampled_mask=sampled, is_content=content, placeholder_token_ids={"image": 7},
    )  # fmt: skip
    adapter = TypeAdapter(RenderedTokens)
    assert adapter.validate_json(adapter.dump_json(tokens)) == tokens


def test_tokens_that_pypis_package_has_written_are_read() -> None:
    written = {"token_ids": [1, 2], "message_indices": [0, 0], "sampled_mask": [False, True],
               "is_content": [True, True], "message_roles": ["user"], "message_tool_names": [],
               "multi_modal_data": {"mm_hashes": {"image": ["h"]}, "mm_items": {"image": [{"pixel_values": [0.5]}]},
                                    "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}}  # fmt: skip
    tokens = Step.model_validate({"tokens": written}).tokens
    assert (tokens.token_ids, tokens.sampled_mask, tokens.message_indices) == ([1, 2], [False, True], [0, 0])
    assert tokens.multi_modal_data is not None
    assert tokens.multi_modal_data.mm_placeholders["image"] == [PlaceholderRange(0, 1)]


def test_an_encoder_that_asks_for_model_dump_packs_media(values: dict[str, Any]) -> None:
    """verifiers' msgpack encoder calls `model_dump` of a value that has it."""

    def encode(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"dtype": str(value.dtype), "shape": value.shape, "data": value.tobytes()}
        return value.model_dump()

    data = values["MultiModalData"]
    read = msgpack.unpackb(msgpack.packb(data, default=encode))
    assert read["mm_hashes"] == data.mm_hashes
    (placeholder,) = data.mm_placeholders["image"]
    assert read["mm_placeholders"] == {"image": [{"offset": placeholder.offset, "length": placeholder.length}]}
    tensor = data.mm_items["image"][0]["pixel_values"]
    packed = read["mm_items"]["image"][0]["pixel_values"]
    assert np.array_equal(np.frombuffer(packed["data"], packed["dtype"]).reshape(packed["shape"]), tensor)
