"""From a directory to a renderer; every way this fails says what is wrong with which file or token."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from renderers import Format, MediaPolicy, RendererError, TemplateRenderer, errors, is_multimodal, load_renderer
from renderers.errors import LoadError, MediaLimitError, MessageError, ModelNotFoundError, TemplateSyntaxError

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTION = [{"role": "user", "content": "Q"}]


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of everything but the weights, to be broken."""
    ignored = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model", ignore=ignored))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def text_of(renderer: TemplateRenderer, **options: Any) -> str:
    return renderer.tokenizer.decode(renderer.render(QUESTION, **options).token_ids)


def test_a_directory_loads_by_path_and_by_name(model: Path) -> None:
    assert load_renderer(model).render_ids(QUESTION) == load_renderer(str(model)).render_ids(QUESTION)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", Path("nowhere"), "~/nowhere", "a/b/c"])
def test_an_unknown_directory_is_named_without_a_request_to_the_hub(name: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="no such directory") as caught:
        load_renderer(name)
    assert caught.value.name == str(name)


def test_a_file_is_not_looked_up_at_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="it is a file, and not the directory of a model"):
        load_renderer("model.gguf")


def test_a_directory_without_a_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match=r"tokenizer\.json") as caught:
        load_renderer(model)
    assert str(caught.value).startswith(f"{model} holds no tokenizer.json: ")


@pytest.mark.parametrize(
    "filename", ["tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "chat_template.json"]
)
@pytest.mark.parametrize("content", ["{", "[1]", "\udcff"])
def test_a_broken_json_file_is_named(model: Path, filename: str, content: str) -> None:
    if filename == "chat_template.json":
        (model / "chat_template.jinja").unlink()
    (model / filename).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(LoadError, match=filename.replace(".", r"\.")):
        load_renderer(model)


def test_a_tokenizer_that_tokenizers_cannot_read_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": {"type": "Unheard"}}')
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        load_renderer(model)


# Templates.


def test_an_error_for_a_directory_without_a_template_explains_how_to_pass_one(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(LoadError, match="chat_template=") as caught:
        load_renderer(model)
    assert str(caught.value).startswith(f"{model} holds no chat_template.jinja: ")


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.json"])
@pytest.mark.parametrize("named", [False, True])
def test_a_template_is_found_in_older_file_layouts(model: Path, place: str, named: bool) -> None:
    (model / "chat_template.jinja").unlink()
    if not (model / place).exists():
        (model / place).write_text("{}")
    value = [{"name": "rag", "template": "no"}, {"name": "default", "template": CHATML}] if named else CHATML
    edit(model / place, lambda content: content.update(chat_template=value))
    assert text_of(load_renderer(model)) == "<|im_start|>user\nQ<|im_end|>\n"


def test_a_template_passed_as_text_or_path_overrides_that_of_the_directory(model: Path, tmp_path: Path) -> None:
    source = CHATML.replace("{{ m.role }}", "{{ m.role }}!")
    path = tmp_path / "mine.jinja"
    path.write_text(source)
    for given in (source, path, str(path)):
        assert text_of(load_renderer(model, chat_template=given)) == "<|im_start|>user!\nQ<|im_end|>\n"


def test_a_template_that_does_not_exist_is_named_with_those_that_do(model: Path) -> None:
    for given in ("nowhere.jinja", Path("nowhere.jinja"), "rag"):
        with pytest.raises(LoadError, match="the name of one of the model's own templates") as caught:
            load_renderer(model, chat_template=given)
        assert str(caught.value).startswith(f"{model} holds no {given}: ")
        assert str(caught.value).endswith("which are 'default'")


def test_a_syntax_error_names_the_line_and_the_model(model: Path) -> None:
    (model / "chat_template.jinja").write_text("fine\n{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(TemplateSyntaxError, match="line 3") as caught:
        load_renderer(model)
    assert caught.value.line == 3
    assert str(model) in str(caught.value)


def test_a_template_that_refuses_a_plain_question_is_a_load_error(model: Path) -> None:
    with pytest.raises(LoadError, match="only songs"):
        load_renderer(model, chat_template="{{ raise_exception('only songs') }}")


def test_a_template_that_does_not_print_the_answer_is_a_load_error(model: Path) -> None:
    with pytest.raises(LoadError, match="does not print the content of an assistant message"):
        load_renderer(model, chat_template="{{ messages[0].content }}<|im_end|>")


# Control tokens.


def without_token(model: Path, token: str) -> None:
    def drop(content: dict[str, Any]) -> None:
        content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["content"] != token]

    edit(model / "tokenizer.json", drop)


@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>", "<|image_pad|>"])
def test_a_tokenizer_without_a_needed_token_is_an_error_that_names_token_and_model(model: Path, token: str) -> None:
    without_token(model, token)
    with pytest.raises(LoadError) as caught:
        load_renderer(model)
    assert f"the tokenizer of {model} has no token {token!r}" in str(caught.value)


def reads_text_only(model: Path) -> None:
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (model / file).unlink()


def test_a_text_model_does_not_need_the_tokens_of_images(model: Path) -> None:
    without_token(model, "<|image_pad|>")
    reads_text_only(model)
    assert text_of(load_renderer(model)) == "<|im_start|>user\nQ<|im_end|>\n"


def test_a_format_given_by_hand_is_used_and_its_tokens_are_checked(model: Path) -> None:
    given = Format(name="mine", stop_tokens=("<|endoftext|>",))
    renderer = load_renderer(model, format=given)
    assert renderer.format is given
    assert renderer.get_stop_token_ids() == [renderer.tokenizer.control_id("<|endoftext|>")]
    with pytest.raises(LoadError, match="<gone>"):
        load_renderer(model, format=Format(name="mine", stop_tokens=("<gone>",)))


def test_the_stop_tokens_are_the_turn_end_and_then_the_eos_token(model: Path) -> None:
    (model / "generation_config.json").unlink()
    renderer = load_renderer(model)
    assert renderer.get_stop_token_ids() == [renderer.tokenizer.control_id("<|im_end|>")]
    edit(model / "tokenizer_config.json", lambda content: content.update(eos_token={"content": "<|endoftext|>"}))
    renderer = load_renderer(model)
    tokens = [renderer.tokenizer.control_token(token_id) for token_id in renderer.get_stop_token_ids()]
    assert tokens == ["<|im_end|>", "<|endoftext|>"]


@pytest.mark.parametrize("eos", [256, [258, 256], [256, 10**9, 0]])
def test_tokens_at_which_engines_stop_by_the_generation_config_are_stops_too(model: Path, eos: Any) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    renderer = load_renderer(model)
    tokens = [renderer.tokenizer.control_token(token_id) for token_id in renderer.get_stop_token_ids()]
    assert tokens == ["<|im_end|>", "<|endoftext|>"]


# Modalities and policies.


def test_an_image_for_a_text_model_is_refused_with_its_position(model: Path) -> None:
    reads_text_only(model)
    renderer = load_renderer(model)
    assert not is_multimodal(renderer)
    assert renderer.render(QUESTION).multi_modal_data is None
    image = {"type": "image", "image": Image.new("RGB", (32, 32))}
    with pytest.raises(MessageError, match=r"preprocessor_config\.json") as caught:
        renderer.render([*QUESTION, {"role": "user", "content": [{"type": "text", "text": "x"}, image]}])
    assert (caught.value.message_index, caught.value.part_index) == (1, 1)


@pytest.mark.parametrize("kind", ["video", "video_url"])
def test_a_video_given_to_a_model_of_images_is_refused(model: Path, kind: str) -> None:
    (model / "video_preprocessor_config.json").unlink()
    with pytest.raises(MessageError, match=r"only images.*video_preprocessor_config\.json") as caught:
        load_renderer(model).render([{"role": "user", "content": [{"type": kind, kind: b"x"}]}])
    assert (caught.value.message_index, caught.value.part_index) == (0, 0)


def test_a_tokenizer_without_a_token_for_videos_still_renders_images(model: Path) -> None:
    without_token(model, "<|video_pad|>")
    renderer = load_renderer(model)
    assert list(renderer.processors) == ["image"]
    with pytest.raises(MessageError, match="video_pad"):
        renderer.render([{"role": "user", "content": [{"type": "video", "video": b"x"}]}])


def test_numbers_of_processors_may_be_nested_in_one_file(model: Path) -> None:
    before = load_renderer(model)
    files = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}
    joint = {f"{kind}_processor": json.loads((model / file).read_text()) for kind, file in files.items()}
    for file in files.values():
        (model / file).unlink()
    (model / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor", **joint}))
    after = load_renderer(model)
    fingerprints = [{kind: p.fingerprint for kind, p in r.processors.items()} for r in (before, after)]
    assert fingerprints[0] == fingerprints[1]
    assert list(after.processors) == ["image", "video"]


def test_settings_nested_in_one_file_override_older_files(model: Path) -> None:
    numbers = json.loads((model / "preprocessor_config.json").read_text())
    numbers["size"] = {"shortest_edge": 1024, "longest_edge": 2048}
    before = load_renderer(model).processors["image"].fingerprint
    (model / "processor_config.json").write_text(json.dumps({"image_processor": numbers}))
    after = load_renderer(model).processors["image"]
    assert after.fingerprint != before
    (model / "processor_config.json").unlink()
    (model / "preprocessor_config.json").write_text(json.dumps(numbers))
    assert load_renderer(model).processors["image"].fingerprint == after.fingerprint


def test_a_qwen2_vl_without_a_file_for_videos_takes_the_numbers_of_images(model: Path) -> None:
    (model / "video_preprocessor_config.json").unlink()
    (model / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    assert list(load_renderer(model).processors) == ["image", "video"]


def test_numbers_of_sound_are_not_those_of_images(model: Path) -> None:
    reads_text_only(model)
    (model / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": "WhisperFeatureExtractor"}))
    assert not is_multimodal(load_renderer(model))


def test_a_processor_that_cannot_be_loaded_is_named_when_an_image_is_rendered(model: Path) -> None:
    reads_text_only(model)
    code = {"image_processor_type": "Theirs", "auto_map": {"AutoImageProcessor": "theirs.Theirs"}}
    (model / "preprocessor_config.json").write_text(json.dumps(code))
    renderer = load_renderer(model)
    assert renderer.render_ids(QUESTION)
    with pytest.raises(MessageError, match="auto_map"):
        renderer.render([{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (32, 32))}]}])


def test_the_media_policy_is_used(model: Path) -> None:
    renderer = load_renderer(model, media_policy=MediaPolicy(max_pixels=100))
    message = {"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (11, 10))}]}
    with pytest.raises(MediaLimitError, match="max_pixels=100"):
        renderer.render([message])


# Conversations that are none.

BAD: list[tuple[Any, type[MessageError], int | None, int | None, str]] = [
    ("hello", MessageError, None, None, "str"),
    ({"role": "user", "content": "x"}, MessageError, None, None, "dict"),
    (None, MessageError, None, None, "NoneType"),
    (["hello"], MessageError, 0, None, "str"),
    ([{"role": "bot", "content": "x"}], MessageError, 0, None, "'bot'"),
    ([{"content": "x"}], MessageError, 0, None, "None"),
    ([*QUESTION, {"role": ["user"], "content": "x"}], MessageError, 1, None, "user"),
    ([*QUESTION, {"role": "user"}], MessageError, 1, None, "no content"),
    ([*QUESTION, {"role": "user", "content": 3}], MessageError, 1, None, "int"),
    ([*QUESTION, {"role": "user", "content": b"x"}], MessageError, 1, None, "bytes"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}, 3]}], MessageError, 0, 1, "int"),
    ([{"role": "user", "content": [{"type": "audio"}]}], MessageError, 0, 0, "'audio'"),
    ([{"role": "user", "content": [{"words": "x"}]}], MessageError, 0, 0, "None"),
    ([{"role": "user", "content": [{"text": "x", "image": "y"}]}], MessageError, 0, 0, "None"),
    ([*QUESTION, {"role": "user", "content": [{"type": "text"}]}], MessageError, 1, 0, "needs a text"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], MessageError, 0, 0, "needs a text"),
    ([{"role": "assistant", "content": "x", "reasoning_content": 3}], MessageError, 0, None, "reasoning_content"),
    ([{"role": "user", "content": "x", "tool_calls": [{}]}], MessageError, 0, None, "only the assistant"),
    ([{"role": "assistant", "content": "x", "tool_calls": 3}], MessageError, 0, None, "int"),
    ([{"role": "assistant", "content": "x", "tool_calls": ["look"]}], MessageError, 0, None, "a tool call is"),
    ([{"role": "assistant", "content": "x", "tool_calls": [{"function": {}}]}], MessageError, 0, None, "a name"),
]


@pytest.mark.parametrize(("messages", "kind", "message", "part", "word"), BAD, ids=range(len(BAD)))
def test_an_error_for_a_malformed_conversation_names_the_place_and_reason(
    renderer: TemplateRenderer, messages: Any, kind: type[MessageError], message: int, part: int, word: str
) -> None:
    with pytest.raises(MessageError, match=word) as caught:
        renderer.render(messages)
    assert type(caught.value) is kind
    assert (caught.value.message_index, caught.value.part_index) == (message, part)
    assert isinstance(caught.value, RendererError)
    if message is not None:
        assert str(caught.value).startswith(f"message {message}")


def test_an_assistant_turn_of_tool_calls_needs_no_content(renderer: TemplateRenderer) -> None:
    calls = [{"function": {"name": "look", "arguments": '{"a": 1}'}}]
    without = renderer.render([*QUESTION, {"role": "assistant", "tool_calls": calls}])
    empty = renderer.render([*QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}])
    assert without.token_ids == empty.token_ids
    assert '{"name": "look", "arguments": {"a": 1}}' in renderer.tokenizer.decode(without.token_ids)


def test_content_of_none_is_printed_as_absent_content(model: Path) -> None:
    renderer = load_renderer(model, chat_template=CHATML)
    calls = [{"function": {"name": "look", "arguments": {}}}]
    absent = renderer.render([{"role": "assistant", "tool_calls": calls}])
    none = renderer.render([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert renderer.tokenizer.decode(absent.token_ids) == "<|im_start|>assistant\n<|im_end|>\n"
    assert none.token_ids == absent.token_ids


@pytest.mark.parametrize("key", ["reasoning", "thinking"])
def test_older_names_of_reasoning_are_read(model: Path, key: str) -> None:
    source = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content }}|{{ m.content }}")
    renderer = load_renderer(model, chat_template=source)
    rendered = renderer.render([{"role": "assistant", "content": "A", key: "hm"}])
    assert renderer.tokenizer.decode(rendered.token_ids) == "<|im_start|>assistant\nhm|A<|im_end|>\n"


def test_every_error_of_the_package_has_one_root() -> None:
    found = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]
    assert len(found) > 15
    assert [kind for kind in found if not issubclass(kind, RendererError)] == []
