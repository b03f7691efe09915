"""Whatever a model's files, a conversation or a path hold: an answer or an error of ours, in bounded time.

Files and conversations are drawn: any value of JSON and a few that only Python has, at any place.
"""

import copy
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import pytest
from corpus import user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loaded import renderer_of
from PIL import Image

from renderers import (
    MediaPolicy,
    RendererError,
    TemplateRenderer,
    build_training_sample,
    load_renderer,
)
from renderers.errors import (
    LoadError,
    MediaError,
    MediaLimitError,
    TemplateError,
)

HALF_A_PAIR = "\ud800"


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


NUMBERS = [True, 0, -1, 1.5, 2**31, 2**63, 10**5000, float("nan"), float("inf"), 1e308]
TEXTS = ["", "x", HALF_A_PAIR, "<|im_end|>", "a" * 5000]
LISTS = [[], [1.5], ["x"], [None], [{"id": 0}], [{"type": "image", "image": 5}], [{"type": "text"}]]
DICTS = [{}, {"a": 1}, {HALF_A_PAIR: 1}, {"content": 5}, {"type": "x"}, {"url": 5}]
VALUES = st.sampled_from([None, *NUMBERS, *TEXTS, *LISTS, *DICTS])
DEEP = st.sampled_from([50, 400, 3000]).map(nested)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:6]):
            yield from places(item, (*path, index))


@st.composite
def altered(draw: st.DrawFn, original: Any) -> Any:
    """The value with one to three places replaced, removed or renamed."""
    value = copy.deepcopy(original)
    for path in draw(st.lists(st.sampled_from(list(places(original))), min_size=1, max_size=3)):
        new = draw(VALUES | DEEP)
        if not path:
            return new
        holder = value
        try:
            for step in path[:-1]:
                holder = holder[step]
            match draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename"])):
                case "replace":
                    holder[path[-1]] = new
                case "remove":
                    del holder[path[-1]]
                case "rename":
                    holder[draw(st.sampled_from(["x", HALF_A_PAIR, ""]))] = holder.pop(path[-1])
        except (TypeError, KeyError, IndexError):  # an earlier change took the place away
            continue
    return value


def as_json(value: Any) -> bytes:
    limit, digits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    sys.setrecursionlimit(20_000)
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value).encode()
    finally:
        sys.setrecursionlimit(limit)
        sys.set_int_max_str_digits(digits)


def check_error(error: RendererError) -> None:
    """It can be printed, and read."""
    assert len(str(error).encode()) < 6000


# Model directories.


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("any") / "model"
    shutil.copytree(tiny_model_dir, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    return directory


def use(directory: Path) -> None:
    renderer = load_renderer(directory)
    image = {"type": "image", "image": np.zeros((40, 40, 3), np.uint8)}
    for messages in ([user("a")], [user([{"type": "text", "text": "a"}, image])]):
        try:
            prompt = renderer.render(messages, add_generation_prompt=True)
        except RendererError as error:
            check_error(error)
            continue
        renderer.parse_response(prompt.token_ids)
        renderer.bridge_to_next_turn(prompt.token_ids, renderer.get_stop_token_ids()[:1], [user("b")])


FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
BROKEN = [b"", b"\xff\xfe", b"{", b"null", b"[]", b"NaN", b"1" * 5000, b"\xef\xbb\xbf{}", b"\0"]
BYTES = st.sampled_from([*BROKEN, b"[" * 100_000, b'{"a":' * 100_000]) | st.binary(max_size=20)


@pytest.mark.slow
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_file_of_a_model_directory_loads_or_raises_a_renderer_error(model: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    original = (model / name).read_bytes()
    content = data.draw(BYTES | altered(json.loads(original)).map(as_json))
    try:
        (model / name).write_bytes(content)
        use(model)
    except RendererError as error:
        check_error(error)
    finally:
        (model / name).write_bytes(original)


def rewritten(directory: Path, target: Path, name: str, **changes: Any) -> Path:
    shutil.copytree(directory, target)
    content = json.loads((target / name).read_bytes())
    (target / name).write_bytes(as_json({**content, **changes}))
    return target


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "tokenizer.json",
            {"added_tokens": [{"id": 1, "content": "a"}, 1.5]},
            "added_tokens holds no id and content at 1.5",
        ),
        ("tokenizer.json", {"added_tokens": {"a": 1}}, "added_tokens holds no id and content"),
        ("tokenizer.json", {"added_tokens": [{"id": 0}]}, "added_tokens holds"),
        ("tokenizer.json", {"model": "x"}, "tokenizer"),
        ("tokenizer_config.json", {"chat_template": ["x"]}, "tokenizer_config"),
        ("tokenizer_config.json", {"chat_template": [{"template": "x"}]}, "tokenizer_config"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {}}}, "tokenizer_config"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "does not map an id"),
        ("tokenizer.json", {"added_tokens": [{"id": 2**40, "content": "a"}]}, "added_tokens holds"),
        ("tokenizer.json", {"added_tokens": [{"id": 5, "content": HALF_A_PAIR}]}, "added_tokens holds"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}, "does not map an id"),
        ("preprocessor_config.json", {"min_pixels": 2**31}, "min_pixels is 2147483648; .* from 1 to"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 2**31, "longest_edge": 2**32}}, "shortest_edge is"),
        ("preprocessor_config.json", {"patch_size": 1.5}, "patch_size is 1.5; .* whole number"),
        ("preprocessor_config.json", {"patch_size": float("inf")}, "patch_size is inf"),
        ("preprocessor_config.json", {"patch_size": True}, "patch_size is True"),
        ("preprocessor_config.json", {"patch_size": 10**5000}, "Exceeds|cannot be written"),
        ("preprocessor_config.json", {"patch_size": 0}, "patch_size is 0"),
        ("preprocessor_config.json", {"patch_size": "many"}, "many"),
        ("preprocessor_config.json", {"resample": 1}, "resample is 1;"),
        ("preprocessor_config.json", {"size": None}, "shortest_edge"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize"),
        ("preprocessor_config.json", {"image_std": [0.5, 0, 0.5]}, "may be 0"),
        ("preprocessor_config.json", {"image_std": [0.5, 0.5, float("nan")]}, "image_std"),
        ("preprocessor_config.json", {"image_mean": 5}, "image_mean is 5"),
        ("processor_config.json", {"image_processor": 5}, "image_processor is an object"),
        ("video_preprocessor_config.json", {"fps": -2, "num_frames": None}, "fps is -2"),
        ("video_preprocessor_config.json", {"max_frames": 2**40}, "max_frames is"),
        ("video_preprocessor_config.json", {"fps": 2, "num_frames": 4}, "both set"),
        (
            "video_preprocessor_config.json",
            {"video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": True, "fps": None},
            "neither fps nor num_frames",
        ),
        ("video_preprocessor_config.json", {"fps": "fast"}, "fast"),
        ("video_preprocessor_config.json", {"do_rescale": False}, "do_rescale"),
        ("video_preprocessor_config.json", {"resample": 1}, "resample is 1;"),
        ("video_preprocessor_config.json", {"size": {"shortest_edge": 1}}, "longest_edge"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(
    model: Path, tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(LoadError, match=said) as refused:
        load_renderer(rewritten(model, tmp_path / "model", name, **changes))
    assert name in str(refused.value)


def test_an_image_that_would_be_enlarged_past_memory_is_refused(model: Path, tmp_path: Path) -> None:
    directory = rewritten(model, tmp_path / "model", "preprocessor_config.json", patch_size=1024, merge_size=64)
    renderer = load_renderer(directory)
    with pytest.raises(MediaLimitError, match=r"preprocessor_config\.json"):
        renderer.render([user([{"type": "image", "image": Image.new("RGB", (8, 8))}])])


# Paths.

NAMES = [HALF_A_PAIR, f"/tmp/{HALF_A_PAIR}", "/tmp/\udcff", "a\0b", "/tmp/a\0b", "/tmp/" + "a" * 300, ""]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_an_invalid_file_name_raises_a_renderer_error(model: Path, tmp_path: Path, name: str) -> None:
    allowed = load_renderer(model, media_policy=MediaPolicy(allowed_directories=(tmp_path,)))
    for value in (name, Path(name)):
        with pytest.raises(LoadError) as refused:
            load_renderer(Path("/nowhere") / value)
        check_error(refused.value)
        with pytest.raises(LoadError) as refused:
            load_renderer(model, chat_template=value or "nowhere")
        check_error(refused.value)
        with pytest.raises(MediaError) as unread:
            allowed.render([user([{"type": "image", "image": value}])])
        check_error(unread.value)


# Conversations.

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "q"}]},
    {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "r",
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "x"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "22"},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
]


def everything(renderer: TemplateRenderer, messages: Any, tools: Any) -> None:
    """Every way in which a conversation and its tools reach a renderer; an error of one keeps no other from running."""
    prompt = renderer.render([user("q")], add_generation_prompt=True).token_ids
    completion = renderer.get_stop_token_ids()[:1]
    new = messages[-1:] if isinstance(messages, list) else messages
    for call in (
        lambda: renderer.render(messages, tools=tools, add_generation_prompt=True),
        lambda: renderer.parse_response(completion, tools=tools),
        lambda: renderer.try_bridge(prompt, completion, new, tools=tools),
        lambda: renderer.try_bridge(prompt, completion, new, tools=tools, previous_messages=messages),
        lambda: build_training_sample(renderer, messages, tools=tools),
        lambda: renderer.prefetch(messages).result(),
    ):
        try:
            call()
        except RendererError as error:
            check_error(error)


PROMPTS = ["trl/qwen3", "trl/gemma4", "trl/llama3_1", "deepseek-v3.2", "deepseek-v4"]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=altered(CONVERSATION) | st.just(CONVERSATION), tools=st.just(corpus.TOOLS) | altered(corpus.TOOLS))
def test_any_conversation_is_rendered_or_raises_a_renderer_error(prompt: str, messages: Any, tools: Any) -> None:
    everything(renderer_of(prompt) if "/" in prompt else load_renderer_once(prompt), messages, tools)


_LOADED: dict[str, TemplateRenderer] = {}


def load_renderer_once(name: str) -> TemplateRenderer:
    if name not in _LOADED:
        _LOADED[name] = load_renderer(corpus.model_dir(name))
    return _LOADED[name]


@pytest.mark.slow
@pytest.mark.parametrize("value", [10**5000, nested(3000), HALF_A_PAIR], ids=["a long integer", "deep", "half a pair"])
def test_arguments_that_cannot_be_printed_raise_an_error_with_the_cure(value: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": value}}}
    messages = [user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(RendererError, match=r"pass (it )?as text|errors='replace'"):
        renderer_of("trl/qwen3").render(messages)


# Arguments of another type than their annotation.

OTHER_TYPES = [5, 1.5, [1.5], {"a": 1}, object(), np.zeros(3), NUMBERS[6]]


@pytest.mark.parametrize("value", OTHER_TYPES, ids=lambda value: type(value).__name__)
def test_ids_of_another_type_raise_a_renderer_error(model: Path, value: Any) -> None:
    renderer = load_renderer(model)
    stop = renderer.get_stop_token_ids()[:1]
    with pytest.raises(RendererError, match="token ids"):
        renderer.parse_response(value)
    with pytest.raises(RendererError, match="token ids"):
        renderer.try_bridge(value, stop, [user("b")])


def test_a_prompt_function_refuses_deep_nesting_as_a_template_does() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": nested(3000)}}}
    with pytest.raises(TemplateError, match="nested"):
        load_renderer_once("deepseek-v3.2").render(
            [user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]
        )
