"""Renderer classes of families, and what `create_renderer` makes of a tokenizer without a configuration."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import pytest
from transformers import AutoProcessor

import renderers
from renderers import (
    AutoRendererConfig,
    DefaultRenderer,
    DefaultRendererConfig,
    GLM5Renderer,
    GLM5RendererConfig,
    GLM51Renderer,
    Qwen3Renderer,
    Qwen3RendererConfig,
    Qwen3VLRenderer,
    Qwen3VLRendererConfig,
    RendererOptions,
    TemplateRenderer,
    create_renderer,
    load_tokenizer,
)
from renderers.configs import config_class
from renderers.errors import ConfigError
from renderers.family_options import options_of
from renderers.family_renderers import FamilyRenderer, renderer_class
from renderers.model_files import MODEL_RENDERER_MAP, ModelTokenizer
from renderers.options import default_options

QUESTION = [{"role": "user", "content": "Q"}]
FAMILIES = sorted({*MODEL_RENDERER_MAP.values(), "default"})


def tokenizer_named(name: str, directory: Path) -> ModelTokenizer:
    tokenizer = load_tokenizer(str(directory))
    tokenizer.name_or_path = name
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_defaults_of_a_family_are_what_its_configuration_stands_for(family: str) -> None:
    config = config_class(family)()
    assert default_options(family) == options_of(config)
    assert renderer_class(family).family == family
    assert f"{type(config).__name__}" == f"{renderer_class(family).__name__}Config"
    assert getattr(renderers, renderer_class(family).__name__) is renderer_class(family)


@pytest.mark.slow
def test_each_class_is_in_the_module_that_has_its_name_in_the_other_package() -> None:
    modules = """deepseek_r1 deepseek_v3 deepseek_v4 default gemma4 glm45 glm5 gpt_oss hy3 inkling kimi_k2 kimi_k25
    laguna_s21 laguna_xs2 llama_3 minimax_m2 nemotron3 prime_qwen3 qwen3 qwen35 qwen36 qwen38 qwen3_vl"""
    found = set()
    for name in modules.split():
        module = importlib.import_module(f"renderers.{name}")
        assert importlib.util.find_spec(module.__name__) is module.__spec__
        assert getattr(renderers, name) is module
        assert all(getattr(module, each) is getattr(renderers, each) for each in module.__all__)
        found.update(module.__all__)
    assert found == {renderer_class(family).__name__ for family in FAMILIES}
    assert renderers.laguna_xs2.__all__ == ["LagunaXS2Renderer", "LagunaM1Renderer", "LagunaXS21Renderer"]
    code = "import renderers.qwen3_vl as module, renderers; assert module.Qwen3VLRenderer is renderers.Qwen3VLRenderer"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_listed_model_without_configuration_has_the_configuration_and_the_class_of_its_family() -> None:
    tokenizer = tokenizer_named("Qwen/Qwen3-8B", corpus.model_dir("qwen-3"))
    renderer = create_renderer(tokenizer)
    assert type(renderer) is Qwen3Renderer
    assert renderer.config == Qwen3RendererConfig()
    assert renderer.config.model_copy(update={"enable_thinking": False}) == Qwen3RendererConfig(enable_thinking=False)
    explicit = create_renderer(tokenizer, AutoRendererConfig())
    assert type(explicit) is Qwen3Renderer
    assert (explicit.config, explicit.format, explicit.thinking_retention) == (
        renderer.config,
        renderer.format,
        renderer.thinking_retention,
    )


@pytest.mark.slow
def test_a_model_that_is_not_listed_has_the_default_configuration_and_options_none_of_a_family() -> None:
    tokenizer = load_tokenizer(str(corpus.model_dir("qwen-3")))
    assert isinstance(create_renderer(tokenizer), DefaultRenderer)
    assert create_renderer(tokenizer).config == DefaultRendererConfig()
    options = RendererOptions(history="as_sampled")
    renderer = create_renderer(tokenizer, options)
    assert type(renderer) is TemplateRenderer
    assert renderer.config is options


@pytest.mark.slow
def test_template_variables_without_configuration_are_those_of_the_family() -> None:
    listed = tokenizer_named("Qwen/Qwen3-8B", corpus.model_dir("qwen-3"))
    silent = create_renderer(listed, chat_template_kwargs={"enable_thinking": False})
    assert silent.config == Qwen3RendererConfig(enable_thinking=False)
    with pytest.raises(ValueError, match="Unsupported chat_template_kwargs for 'qwen3'"):
        create_renderer(listed, chat_template_kwargs={"thinking": False})


@pytest.mark.slow
def test_pydantic_is_loaded_when_the_configuration_is_read_and_not_before() -> None:
    program = f"""
import sys
from renderers import create_renderer, load_tokenizer
from renderers.qwen3 import Qwen3Renderer
tokenizer = load_tokenizer({str(corpus.model_dir("qwen-3"))!r})
tokenizer.name_or_path = "Qwen/Qwen3-8B"
renderer = create_renderer(tokenizer)
renderer.parse_response(renderer.render_ids([{{"role": "user", "content": "Q"}}]))
assert isinstance(renderer, Qwen3Renderer)
assert "pydantic" not in sys.modules
assert renderer.config.name == "qwen3"
assert "pydantic" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_a_class_is_a_renderer_of_its_family_for_any_model_name() -> None:
    tokenizer = load_tokenizer(str(corpus.model_dir("qwen-3")))
    renderer = Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))
    silent = create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))
    assert type(silent) is Qwen3Renderer
    assert renderer.render_ids(QUESTION, add_generation_prompt=True) == silent.render_ids(
        QUESTION, add_generation_prompt=True
    )
    assert Qwen3Renderer(tokenizer).config == Qwen3RendererConfig()
    assert issubclass(GLM51Renderer, GLM5Renderer)


@pytest.mark.slow
@pytest.mark.parametrize("config", [GLM5RendererConfig(), RendererOptions(), DefaultRendererConfig()], ids=repr)
def test_a_class_refuses_the_configuration_of_another_family(config: Any) -> None:
    with pytest.raises(ConfigError, match="config of Qwen3Renderer"):
        Qwen3Renderer(load_tokenizer(str(corpus.model_dir("qwen-3"))), config)


@pytest.mark.slow
def test_a_class_for_another_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="format"):
        GLM5Renderer(load_tokenizer(str(corpus.model_dir("qwen-3"))))


def test_a_processor_that_is_given_is_used_with_its_settings(tiny_model_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model_dir))
    processor = AutoProcessor.from_pretrained(tiny_model_dir)
    image = {"type": "image", "image": np.zeros((256, 256, 3), dtype=np.uint8)}
    question = [{"role": "user", "content": [image]}]
    same = Qwen3VLRenderer(tokenizer, processor=processor).render(question)
    own = Qwen3VLRenderer(tokenizer, Qwen3VLRendererConfig()).render(question)
    assert same.token_ids == own.token_ids
    assert same.multi_modal_data is not None
    assert own.multi_modal_data is not None
    assert same.multi_modal_data.mm_hashes == own.multi_modal_data.mm_hashes
    size = processor.image_processor.size
    processor.image_processor.size = {**dict(size), "longest_edge": 128 * 128}
    small = Qwen3VLRenderer(tokenizer, processor=processor).render(question)
    assert len(small.token_ids) < len(own.token_ids)
    with pytest.raises(ConfigError, match="processor"):
        Qwen3VLRenderer(tokenizer, processor="Qwen/Qwen3-VL-8B-Instruct")


def test_the_parent_class_of_all_is_a_template_renderer() -> None:
    assert issubclass(FamilyRenderer, TemplateRenderer)
    assert all(issubclass(renderer_class(family), FamilyRenderer) for family in FAMILIES)
