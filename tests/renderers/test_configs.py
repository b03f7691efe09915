"""Typed configurations: which are accepted, what each makes of a renderer, and the errors for a wrong one."""

import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from training_conversations import renderer_of

import renderers
from renderers import (
    AutoRendererConfig,
    BaseRendererConfig,
    CustomRendererConfig,
    DefaultRendererConfig,
    GLM5RendererConfig,
    GptOssRendererConfig,
    Llama3RendererConfig,
    Qwen3RendererConfig,
    Qwen3VLRendererConfig,
    Qwen36RendererConfig,
    Qwen38RendererConfig,
    RenderedTokens,
    RendererConfig,
    create_renderer,
    load_renderer,
)
from renderers.configs import config_class
from renderers.errors import ConfigError, MessageError
from renderers.family_options import options_of, resolve_config

QUESTION = [{"role": "user", "content": "Q"}]
ANY: TypeAdapter[Any] = TypeAdapter(RendererConfig)


@pytest.mark.parametrize(
    "wrong",
    [{"name": "qwen3", "add_vision_id": True}, {"name": "qwen9"}, {"name": "inkling", "reasoning_effort": 2.0},
     {"name": "default", "preserve_all_thinking": True}, {"name": "custom", "import_path": "nothing"}],
)  # fmt: skip
def test_a_field_of_another_family_and_a_wrong_value_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ANY.validate_python(wrong)


@pytest.mark.parametrize(
    ("config", "retention"),
    [
        (Qwen3RendererConfig(), "tool_cycle"),
        (Qwen3RendererConfig(thinking_retention="all"), "all"),
        (Qwen36RendererConfig(preserve_thinking=True), "all"),
        (Qwen38RendererConfig(), "all"),
        (GLM5RendererConfig(clear_thinking=False), "all"),
        (DefaultRendererConfig(), "template"),
    ],
)
def test_the_retention_of_reasoning_is_explicit_or_follows_from_template_variables(
    config: BaseRendererConfig, retention: str
) -> None:
    assert options_of(config).thinking_retention == retention


def test_a_retention_that_contradicts_a_template_variable_is_refused() -> None:
    with pytest.raises(ValueError, match=r"preserve_thinking=False.*thinking_retention='all'"):
        Qwen36RendererConfig(preserve_thinking=False, thinking_retention="all")
    assert Qwen36RendererConfig(preserve_thinking=True, thinking_retention="all").resolved_retention() == "all"


def test_only_variables_that_are_set_are_passed_to_the_template_but_the_date_always() -> None:
    assert options_of(Qwen3RendererConfig()).chat_template_kwargs == {}
    assert options_of(Qwen3RendererConfig(enable_thinking=False)).chat_template_kwargs == {"enable_thinking": False}
    assert options_of(Llama3RendererConfig()).chat_template_kwargs == {"date_string": "26 Jul 2024"}
    assert options_of(Qwen3VLRendererConfig(image_cache_max=3)).chat_template_kwargs == {}
    effort = config_class("deepseek-v4")(reasoning_effort="max")  # type: ignore[call-arg]
    assert options_of(effort).chat_template_kwargs == {"reasoning_effort": "max", "release": "0731"}
    assert options_of(DefaultRendererConfig(my_switch=1)).chat_template_kwargs == {"my_switch": 1}  # type: ignore[call-arg]


def test_template_variables_are_added_if_the_family_has_them() -> None:
    merged = resolve_config("Qwen/Qwen3-8B", AutoRendererConfig(), {"enable_thinking": False})
    assert merged == Qwen3RendererConfig(enable_thinking=False)
    assert resolve_config("m", DefaultRendererConfig(), {"x": 1}).model_extra == {"x": 1}
    with pytest.raises(
        ValueError, match=r"Unsupported chat_template_kwargs for 'qwen3'.*add_vision_id.*enable_thinking"
    ):
        resolve_config("m", Qwen3RendererConfig(), {"add_vision_id": True})
    with pytest.raises(ValueError, match="tool_parser"):
        resolve_config("m", DefaultRendererConfig(), {"tool_parser": "x"})


def test_the_configuration_of_another_family_than_the_template_is_refused_with_the_fitting_one() -> None:
    with pytest.raises(ConfigError, match=r"format 'qwen3'.*'glm-5'.*qwen3"):
        renderer_of("trl/qwen3", config=GLM5RendererConfig())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl/qwen3", "trl/glm4moe"])
def test_a_typed_configuration_reads_arguments_as_text_and_as_an_object(name: str) -> None:
    renderer = renderer_of(name, config=AutoRendererConfig())
    as_object, as_text = (
        renderer.render_ids([*QUESTION, {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "look", "arguments": arguments}}]}])
        for arguments in ({"city": "x", "n": 1}, '{"city": "x", "n": 1}')
    )  # fmt: skip
    assert as_object == as_text


def test_a_custom_renderer_is_built_with_the_tokenizer_and_its_own_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class MyConfig(BaseRendererConfig):
        depth: int = 1
        _internal_fields = frozenset({"depth"})

    class MyRenderer:
        config_class = MyConfig

        def __init__(self, tokenizer: Any, config: MyConfig) -> None:
            self.tokenizer, self.config = tokenizer, config

    module = ModuleType("my_renderers")
    module.MyRenderer = MyRenderer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_renderers", module)
    config = ANY.validate_python({"name": "custom", "import_path": "my_renderers.MyRenderer", "depth": 7})
    tokenizer = SimpleNamespace(name_or_path="m")
    made = create_renderer(tokenizer, config)
    assert (type(made), made.tokenizer, made.config.depth) == (MyRenderer, tokenizer, 7)
    (tmp_path / "mine.py").write_text("class NotOne: pass\n")
    for path, error in (
        (f"{tmp_path}/mine.py:NotOne", TypeError),
        ("mine", ValueError),
        (f"{tmp_path}/mine.py", ValueError),
        ("my_renderers.No", ValueError),
    ):
        with pytest.raises(error):
            CustomRendererConfig(import_path=path)
    with pytest.raises(FileNotFoundError):
        CustomRendererConfig(import_path=f"{tmp_path}/absent.py:Renderer")


def test_tokens_of_columns_equal_tokens_of_spans() -> None:
    rendered = renderer_of("trl/qwen3").render([*QUESTION, {"role": "assistant", "content": "A"}])
    columns = ("token_ids", "message_indices", "sampled_mask", "is_content", "message_roles", "message_tool_names")
    made = RenderedTokens(**{name: getattr(rendered, name) for name in columns})
    assert [getattr(made, name) for name in columns] == [getattr(rendered, name) for name in columns]
    assert made.message_token_spans() == rendered.message_token_spans()
    assert pickle.loads(pickle.dumps(made)) == made
    only = RenderedTokens(message_indices=[-1, 0, 0, 1], message_roles=["user", "tool"])
    assert only.message_token_spans() == [(1, 3), (3, 4)]
    with pytest.raises(ValueError, match="sampled_mask has 1 entries for 2 tokens"):
        RenderedTokens([1, 2], sampled_mask=[True])


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in renderers.__all__ if not hasattr(renderers, name)] == []


def test_media_without_a_processor_have_the_marker_that_is_printed(tiny_model_dir: Path, tmp_path: Path) -> None:
    for file in tiny_model_dir.iterdir():
        if "processor" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    whole, typed = load_renderer(tiny_model_dir), load_renderer(tmp_path, config=Qwen3VLRendererConfig())
    image = {"type": "image_url", "image_url": {"url": "https://not.fetched/1.png"}}
    question = [{"role": "user", "content": [image, {"type": "text", "text": "Q"}]}]
    options: dict[str, Any] = {"add_generation_prompt": True, "process_multimodal": False}
    prompt = typed.render(question, **options)
    assert prompt.token_ids == whole.render(question, **options).token_ids
    assert prompt.logical_ids == prompt.token_ids
    assert renderers.is_multimodal(typed)
    completion = typed.tokenizer.encode_scaffold("A<|im_end|>")
    bridged = [
        each.bridge_to_next_turn(prompt.token_ids, completion, question, process_multimodal=False)
        for each in (typed, whole)
    ]
    assert bridged[0] is not None
    assert bridged[1] is not None
    assert bridged[0].token_ids == bridged[1].token_ids
    assert typed.try_bridge(prompt.token_ids, completion, QUESTION) is renderers.BridgeRefusal.MISSING_MEDIA
    with pytest.raises(MessageError, match="reads only text"):
        typed.render(question)
    with pytest.raises(MessageError, match="reads only text"):
        load_renderer(tmp_path).render(question, **options)


def test_options_that_the_template_cannot_express_are_refused() -> None:
    with pytest.raises(ValueError, match="use_system_prompt"):
        options_of(GptOssRendererConfig(use_system_prompt=False))
    assert options_of(GptOssRendererConfig(model_identity="I")).chat_template_kwargs == {"model_identity": "I"}
