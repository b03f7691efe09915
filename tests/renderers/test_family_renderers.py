"""Renderer classes of families, and what `create_renderer` makes of a tokenizer without a configuration."""

import importlib
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import corpus
import huggingface_hub
import numpy as np
import pytest
from transformers import AutoProcessor

import renderers
from renderers import (
    AutoRendererConfig,
    DefaultRenderer,
    DefaultRendererConfig,
    GLM5RendererConfig,
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
from renderers.family_renderers import renderer_class
from renderers.model_families import MODEL_RENDERER_MAP
from renderers.model_tokenizer import ModelTokenizer

FAMILIES = sorted({*MODEL_RENDERER_MAP.values(), "default"})


def tokenizer_named(name: str, directory: Path) -> ModelTokenizer:
    tokenizer = load_tokenizer(str(directory))
    tokenizer.name_or_path = name
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_a_class_and_a_configuration_of_its_name(family: str) -> None:
    config = config_class(family)()
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
@pytest.mark.parametrize("config", [GLM5RendererConfig(), RendererOptions(), DefaultRendererConfig()], ids=repr)
def test_a_class_refuses_the_configuration_of_another_family(config: Any) -> None:
    with pytest.raises(ConfigError, match="config of Qwen3Renderer"):
        Qwen3Renderer(load_tokenizer(str(corpus.model_dir("qwen-3"))), config)


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


def test_a_tokenizer_that_comes_from_an_open_copy_of_its_repository_is_logged(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gated, copy = "meta-llama/Llama-3.2-1B-Instruct", "unsloth/Llama-3.2-1B-Instruct"

    def download(name: str, **_: Any) -> str:
        if name == gated:
            raise OSError("401")
        return str(tiny_model_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with caplog.at_level(logging.INFO, "renderers"):
        tokenizer = load_tokenizer(gated)
    assert tokenizer.name_or_path == gated
    assert [gated in record.getMessage() and copy in record.getMessage() for record in caplog.records] == [True]
