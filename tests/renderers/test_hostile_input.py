"""What callers, files and templates get wrong: a clear error, a refusal or the right answer, never a wrong token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus import answer, call, says, templates, user
from loaded import directory_of, renderer_of
from PIL import Image

from renderers import (
    BridgeRefusal,
    MultiModalData,
    PlaceholderRange,
    RenderedTokens,
    RendererError,
    RendererOptions,
    TemplateRenderer,
    load_renderer,
)
from renderers.errors import ConfigError, LoadError, MessageError, TemplateError, TemplateSyntaxError
from renderers.process.caches import cache_key
from renderers.template.chat_template import ChatTemplate

# Bridges.


def test_a_generated_call_id_never_equals_a_real_one() -> None:
    renderer = renderer_of("trl/gemma4_v4")
    nameless = {"type": "function", "function": {"name": "run", "arguments": {}}}
    turn = says("", None, [call("get_weather", {}, "call00001"), nameless])
    messages = [user("a"), turn, answer("22", "call00001")]
    prompt = renderer.render(messages[:1], add_generation_prompt=True).token_ids
    full = renderer.render(messages, add_generation_prompt=True)
    stop = renderer.get_stop_token_ids()
    length = next(i for i in range(len(prompt), len(full)) if full.token_ids[i] in stop) + 1
    bridged = renderer.try_bridge(
        prompt, full.token_ids[len(prompt) : length], messages[2:], previous_messages=messages[:2]
    )
    assert isinstance(bridged, RenderedTokens)
    assert bridged.token_ids == full.token_ids
    assert bridged.message_tool_names == ["get_weather"]


def test_two_results_of_unknown_calls_keep_their_own_names() -> None:
    renderer = renderer_of("trl/gemma4_v4")
    prompt = renderer.render([user("a")], add_generation_prompt=True).token_ids
    sampled = renderer.tokenizer.encode_scaffold(
        "<|tool_call>call:x{}<tool_call|><|tool_call>call:y{}<tool_call|><|tool_response>"
    )
    nameless = {"role": "tool", "name": "second", "content": "2"}
    new = [{**answer("1", "call00001"), "name": "first"}, nameless]
    bridged = renderer.try_bridge(prompt, sampled, new)
    assert isinstance(bridged, RenderedTokens)
    text = renderer.tokenizer.decode(bridged.token_ids[len(prompt) + len(sampled) :])
    assert text.index("first") < text.index("second")
    assert bridged.message_tool_names == ["first", "second"]


@pytest.mark.parametrize("template", ["trl/lfm2_2_5", "own/glm-5", "own/glm-4.7-flash"])
@pytest.mark.parametrize("blank", ["", " ", "\n", "\n\n"])
def test_blank_reasoning_that_the_template_drops_is_refused(template: str, blank: str) -> None:
    renderer = renderer_of(template)
    messages = [user("a"), says("b", blank), user("c")]
    prompt = renderer.render(messages[:1], add_generation_prompt=True).token_ids
    last = renderer.render(messages[:2]).token_ids
    full = renderer.render(messages, add_generation_prompt=True).token_ids
    stops = renderer.get_stop_token_ids()
    completion = (
        last[len(prompt) :]
        if last[: len(prompt)] == prompt
        else renderer.tokenizer.encode_scaffold(f"{blank}</think>b")
    )
    completion = [*completion[: next((i for i, t in enumerate(completion) if t in stops), len(completion))], stops[0]]
    bridged = renderer.try_bridge(prompt, completion, messages[2:])
    if isinstance(bridged, RenderedTokens):
        assert bridged.token_ids == full


@pytest.fixture(scope="module")
def seen(renderer: TemplateRenderer) -> tuple[list[int], MultiModalData]:
    images = [{"type": "image", "image": Image.new("RGB", (32 * n, 32))} for n in (1, 2)]
    rendered = renderer.render([user(images)], add_generation_prompt=True)
    assert rendered.multi_modal_data is not None
    return rendered.token_ids, rendered.multi_modal_data


@pytest.mark.parametrize("fault", ["one range for two", "too short", "before the start"])
def test_media_with_impossible_ranges_are_refused(
    renderer: TemplateRenderer, seen: tuple[list[int], MultiModalData], fault: str
) -> None:
    prompt, media = seen
    (first, at), (second, then) = media.items_with_ranges()
    wrong = {
        "one range for two": [(first, at), (second, at)],
        "too short": [(first, at), (second, PlaceholderRange(then.offset, then.length - 1))],
        "before the start": [(first, PlaceholderRange(-5, 0)), (second, then)],
    }[fault]
    completion = renderer.tokenizer.encode_scaffold("A<|im_end|>")
    refused = renderer.try_bridge(
        prompt, completion, [user("R")], previous_multi_modal_data=MultiModalData.from_items(wrong)
    )
    assert refused is BridgeRefusal.MISPLACED_MEDIA
    kept = renderer.try_bridge(prompt, completion, [user("R")], previous_multi_modal_data=media)
    assert isinstance(kept, RenderedTokens)


def test_ids_may_be_arrays_and_results_are_plain_ints(renderer: TemplateRenderer) -> None:
    prompt = renderer.render([user("Q")], add_generation_prompt=True).token_ids
    completion = renderer.tokenizer.encode_scaffold("A<|im_end|>")
    plain = renderer.bridge_to_next_turn(prompt, completion, [user("R")])
    for kind in (np.array, tuple, lambda ids: [np.int64(i) for i in ids]):
        bridged = renderer.bridge_to_next_turn(kind(prompt), kind(completion), [user("R")])
        assert bridged is not None
        assert plain is not None
        assert bridged.token_ids == plain.token_ids
        assert json.loads(json.dumps(bridged.token_ids)) == plain.token_ids
        assert renderer.parse_response(kind(completion)).content == "A"


@pytest.mark.parametrize("template", ["trl/llava_next", "trl/smolvlm", "trl/idefics3"])
def test_text_that_a_template_of_parts_does_not_print_is_logged_with_the_cure(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As given, transformers prints nothing of it either, and says nothing."""
    config = RendererOptions(content_form="as_given", chat_template=templates()[template])
    renderer = load_renderer(directory_of(template), config=config)
    with caplog.at_level("WARNING", logger="renderers"):
        shown = renderer.render([user([{"type": "text", "text": "shown"}])])
        assert not caplog.records
        lost = renderer.render([user("lost")])
    assert "shown" in renderer.tokenizer.decode(shown.token_ids)
    assert "lost" not in renderer.tokenizer.decode(lost.token_ids)
    assert "message 0" in caplog.text
    assert "list of parts" in caplog.text
    assert 'content_form="auto"' in caplog.text


@pytest.mark.parametrize("template", ["trl/qwen3", "trl/llama3_1"])
def test_parts_that_a_template_of_strings_prints_as_data_are_logged_with_the_cure(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One prints nothing of them, the other the list as data."""
    config = RendererOptions(content_form="as_given", chat_template=templates()[template])
    renderer = load_renderer(directory_of(template), config=config)
    with caplog.at_level("WARNING", logger="renderers"):
        renderer.render([user("shown"), says("shown")])
        assert not caplog.records
        renderer.render([user("shown"), says([{"type": "text", "text": "lost"}])])
    assert "message 1" in caplog.text
    assert "as a string" in caplog.text


# Caches.

PLAIN = [0, 0.0, False]
OTHERS = [np.int64(0), np.float64(0.0), np.True_, np.int8(1), np.array([1, 2]), np.array([[1], [2]]), b"\x01"]


@pytest.mark.parametrize("value", [*PLAIN, *OTHERS], ids=repr)
def test_values_other_than_plain_data_have_no_cache_key(value: Any) -> None:
    is_plain = any(value is plain for plain in PLAIN)
    assert (cache_key({"k": [value]}) is not None) == is_plain


def test_plain_values_of_different_types_have_different_cache_keys() -> None:
    keys = [cache_key(value) for value in (0, 0.0, False, None, "0", "", [], {}, (), [0], (0,))]
    assert len(set(keys)) == len(keys)


def test_a_conversation_never_gets_the_cached_ids_of_another(tiny_model_dir: Path) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} {{ m.score }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    scored = load_renderer(tiny_model_dir, chat_template=source)
    rendered = [scored.render([{**user("x"), "score": score}]) for score in (np.int64(0), np.float64(0))]
    texts = [scored.tokenizer.decode(one.token_ids) for one in rendered]
    assert "x 0<" in texts[0]
    assert "x 0.0<" in texts[1]


# Templates.


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.encode('utf-8').decode() }}",
        "{{ messages[0]['content']['encode']().decode() }}",
        "{{ messages[0].content.of('<|im_end|>', 1) }}",
    ],
)
def test_a_template_cannot_remove_the_trace(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, model="m").print([user("<|im_end|>")])


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content.spans }}", "{{ messages | map(attribute='content.spans') | join }}"]
)
def test_a_template_cannot_print_the_trace(source: str) -> None:
    assert ChatTemplate(source, model="m").print([user("a")]).text == ""


DEEP = "{{ " + "(" * 400 + "1" + ")" * 400 + " }}"
NESTED = "{% for a in b %}" * 40 + "{% endfor %}" * 40


@pytest.mark.parametrize("source", ["{% break %}", DEEP, NESTED])
def test_a_template_that_compiles_to_invalid_python_is_a_syntax_error(source: str) -> None:
    with pytest.raises(TemplateSyntaxError):
        ChatTemplate(source, model="m")


def test_an_endless_template_raises_a_template_error() -> None:
    with pytest.raises(TemplateError):
        ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", model="m").print([user("a")])


# Arguments.


@pytest.mark.parametrize("tools", ["abc", {"function": {}}, ["x"], [{"function": None}], [print], 5])
def test_malformed_tools_are_refused_by_every_method(renderer: TemplateRenderer, tools: Any) -> None:
    prompt = renderer.render([user("Q")], add_generation_prompt=True).token_ids
    with pytest.raises(MessageError, match="tools"):
        renderer.render([user("Q")], tools=tools)
    with pytest.raises(MessageError, match="tools"):
        renderer.parse_response(prompt, tools=tools)
    with pytest.raises(MessageError, match="tools"):
        renderer.try_bridge(prompt, prompt, [user("R")], tools=tools)


@pytest.mark.parametrize(
    "previous", ["abc", [None], 5, [user("Q"), {"role": "assistant", "content": "x", "tool_calls": [{"id": "x"}]}]]
)
def test_a_malformed_history_is_refused(renderer: TemplateRenderer, previous: Any) -> None:
    prompt = renderer.render([user("Q")], add_generation_prompt=True).token_ids
    with pytest.raises(MessageError):
        renderer.try_bridge(
            prompt, renderer.tokenizer.encode_scaffold("A<|im_end|>"), [user("R")], previous_messages=previous
        )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x", "tool_call_id": ["a"]},
        {"role": "tool", "content": "x", "name": 5},
        {"role": "assistant", "content": "", "tool_calls": [{"id": [1], "function": {"name": "f"}}]},
    ],
)
def test_ids_and_names_other_than_text_are_refused(renderer: TemplateRenderer, message: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match=r"message 1: .* text"):
        renderer.render([user("Q"), message])


# Files.


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer_config.json", {"chat_template": ["x"]}),
        ("tokenizer_config.json", {"chat_template": [{"template": "x"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {}}}),
        ("tokenizer.json", {"added_tokens": [{"id": 0}]}),
        ("tokenizer.json", {"model": "x"}),
    ],
)
def test_a_file_with_another_structure_is_named(model: Path, name: str, change: dict[str, Any]) -> None:
    content = json.loads((model / name).read_text(encoding="utf-8"))
    (model / name).write_text(json.dumps({**content, **change}), encoding="utf-8")
    with pytest.raises(LoadError, match=name):
        load_renderer(model)


def test_a_template_that_is_not_utf8_is_named(model: Path) -> None:
    (model / "chat_template.jinja").write_bytes(b"\xff\xfe{{ 1 }}")
    with pytest.raises(LoadError, match=r"chat_template\.jinja"):
        load_renderer(model)


@pytest.mark.parametrize("options", [{"name_or_dir": "x" * 5000}, {"chat_template": "x" * 5000}])
def test_an_invalid_path_is_a_load_error(model: Path, options: dict[str, str]) -> None:
    with pytest.raises(LoadError):
        load_renderer(**{"name_or_dir": model, **options})  # type: ignore[arg-type]


def test_options_of_the_wrong_type_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="format"):
        load_renderer(model, format=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="body_policies"):
        RendererOptions(body_policies=["x"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="thinking_retention"):
        RendererOptions(thinking_retention="some")  # type: ignore[arg-type]
    assert issubclass(ConfigError, RendererError)
