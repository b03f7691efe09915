"""From a directory to a renderer; every way this fails says what is wrong with which file or token."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from renderers import TemplateRenderer, load_renderer
from renderers.errors import (
    LoadError,
    MessageError,
)

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


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", Path("nowhere"), "~/nowhere", "a/b/c"])
def test_an_unknown_directory_is_named_without_a_request_to_the_hub(name: Any) -> None:
    with pytest.raises(LoadError, match=f"no model at '{name}': there is no such directory"):
        load_renderer(name)


@pytest.mark.parametrize(
    "filename", ["tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "chat_template.json"]
)
@pytest.mark.parametrize("content", ["{", "[1]", "\udcff", pytest.param('{"a":' * 100_000, id="nested too deeply")])
def test_a_broken_json_file_is_named(model: Path, filename: str, content: str) -> None:
    if filename == "chat_template.json":
        (model / "chat_template.jinja").unlink()
    (model / filename).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(LoadError, match=filename.replace(".", r"\.")):
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


def test_a_syntax_error_names_the_line_and_the_model(model: Path) -> None:
    (model / "chat_template.jinja").write_text("fine\n{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(LoadError, match="line 3") as caught:
        load_renderer(model)
    assert str(model) in str(caught.value)


def reads_text_only(model: Path) -> None:
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (model / file).unlink()


# Modalities and policies.


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


@pytest.mark.parametrize("code", [None, {"AutoImageProcessor": "theirs.Theirs"}], ids=["none", "not loaded"])
def test_a_model_without_a_processor_says_why_when_an_image_is_rendered(model: Path, code: Any) -> None:
    reads_text_only(model)
    if code:
        config = {"image_processor_type": "Theirs", "auto_map": code}
        (model / "preprocessor_config.json").write_text(json.dumps(config))
    renderer = load_renderer(model)
    assert renderer.render_ids(QUESTION)
    with pytest.raises(MessageError, match="auto_map" if code else r"preprocessor_config\.json"):
        renderer.render([{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (32, 32))}]}])


# Conversations that are none.

BAD: list[tuple[Any, int | None, int | None, str]] = [
    ("hello", None, None, "str"),
    (["hello"], 0, None, "str"),
    ([{"role": "bot", "content": "x"}], 0, None, "'bot'"),
    ([*QUESTION, {"role": ["user"], "content": "x"}], 1, None, "user"),
    ([*QUESTION, {"role": "user"}], 1, None, "no content"),
    ([*QUESTION, {"role": "user", "content": 3}], 1, None, "int"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}, 3]}], 0, 1, "int"),
    ([{"role": "user", "content": [{"type": "audio"}]}], 0, 0, "'audio'"),
    ([*QUESTION, {"role": "user", "content": [{"type": "text"}]}], 1, 0, "needs a text"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], 0, 0, "needs a text"),
    ([{"role": "assistant", "content": "x", "reasoning_content": 3}], 0, None, "reasoning_content"),
    ([{"role": "user", "content": "x", "tool_calls": [{}]}], 0, None, "only the assistant"),
    ([{"role": "assistant", "content": "x", "tool_calls": ["look"]}], 0, None, "a tool call is"),
    (
        [{"role": "assistant", "content": "x", "tool_calls": [{"function": {}}]}],
        0,
        None,
        "a tool call is",
    ),
    ([*QUESTION, {"role": "tool", "content": "x", "tool_call_id": ["a"]}], 1, None, " text"),
]


@pytest.mark.parametrize(("messages", "message", "part", "word"), BAD, ids=range(len(BAD)))
def test_an_error_for_a_malformed_conversation_names_the_place_and_reason(
    renderer: TemplateRenderer, messages: Any, message: int, part: int, word: str
) -> None:
    with pytest.raises(MessageError, match=word) as caught:
        renderer.render(messages)
    assert (caught.value.message_index, caught.value.part_index) == (message, part)
    if message is not None:
        assert str(caught.value).startswith(f"message {message}")


def test_a_tokenizer_that_tokenizers_cannot_read_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": {"type": "Unheard"}}')
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        load_renderer(model)


def test_a_template_that_does_not_print_the_answer_is_a_load_error(model: Path) -> None:
    with pytest.raises(LoadError, match="does not print the content of an assistant message"):
        load_renderer(model, chat_template="{{ messages[0].content }}<|im_end|>")
