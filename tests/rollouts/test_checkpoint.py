"""Saved checkpoints: what is loaded from the directory gives the tokens, pixels and log-probabilities of before."""

import asyncio
import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from family_rows import COMPLETION, loaded_family
from model_families import MEDIA_FAMILIES
from transformers import AutoModelForImageTextToText, AutoTokenizer

from renderers import create_renderer, load_renderer
from rollouts import GenerateRequest, LocalEngine, SamplingParams
from rollouts.errors import ArgumentError
from rollouts.models.loading import load_model
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import save_checkpoint

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"


def trained(directory):
    """The model of a directory after a change of every weight."""
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return model.eval()


def prompt(renderer, *, with_image):
    parts = [{"type": "image", "image": IMAGE}] if with_image else []
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]
    return renderer.render(messages, add_generation_prompt=True)


def scored(model, rendered):
    """The log-probabilities of a prompt and of a greedy completion after it."""

    async def generate():
        engine = LocalEngine.from_pretrained(model) if isinstance(model, Path) else LocalEngine(model)
        sampling = SamplingParams(max_tokens=4, temperature=0.0)
        request = GenerateRequest(rendered.token_ids, sampling, rendered.multi_modal_data, prompt_logprobs=True)
        result = await engine.generate(request)
        await engine.close()
        return result

    result = asyncio.run(generate())
    (completion,) = result.completions
    return np.asarray(result.prompt_logprobs), completion.token_ids.tolist(), completion.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MEDIA_FAMILIES))
def test_a_checkpoint_of_a_family_loads_with_equal_tokens_pixels_and_log_probabilities(name, tmp_path):
    family = loaded_family(name)
    model = trained(family.directory)
    directory = save_checkpoint(model, family.renderer, tmp_path / "step-1")
    loaded = load_renderer(directory)
    before, after = prompt(family.renderer, with_image=True), prompt(loaded, with_image=True)
    assert after.token_ids == before.token_ids
    assert after.multi_modal_data.mm_hashes == before.multi_modal_data.mm_hashes
    assert loaded.get_stop_token_ids() == family.renderer.get_stop_token_ids()
    assert loaded.parse_response(COMPLETION) == family.renderer.parse_response(COMPLETION)
    for one, other in zip(scored(model, before), scored(directory, after), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def source(tmp_path):
    """A directory whose template for tools is an entry of tokenizer_config.json, and without generation_config.json."""
    directory = tiny_qwen3_vl(tmp_path / "source")
    default = (directory / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").unlink()
    (directory / "generation_config.json").unlink()
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    named = {"default": default, "tool_use": f"with tools: {default}"}
    settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def texts(renderer):
    """What a conversation is printed as, without tools and with them, and the tokens that end a completion."""
    messages = [{"role": "user", "content": "Which?"}]
    ids = (renderer.render_ids(messages, tools=tools) for tools in (None, TOOLS))
    return [renderer.tokenizer.decode(one) for one in ids], renderer.get_stop_token_ids()


@pytest.mark.slow
def test_a_template_for_tools_and_the_tokens_that_end_a_completion_are_those_of_the_renderer(source, tmp_path):
    renderer = load_renderer(source)
    loaded = load_renderer(save_checkpoint(trained(source), renderer, tmp_path / "saved"))
    assert texts(loaded) == texts(renderer)
    without, with_tools = texts(renderer)[0]
    assert with_tools.startswith("with tools:")
    assert not without.startswith("with tools:")


def test_a_template_that_replaces_those_of_the_model_is_written(source, tmp_path):
    renderer = load_renderer(source, chat_template=TEMPLATE)
    loaded = load_renderer(save_checkpoint(trained(source), renderer, tmp_path / "saved"))
    assert texts(loaded) == texts(renderer)
    assert texts(renderer)[0] == ["user: Which?<|im_end|>"] * 2


@pytest.mark.slow
def test_a_directory_that_has_files_is_left_as_it_is(tmp_path):
    source = tiny_qwen3_vl(tmp_path / "source")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(ArgumentError, match="not empty; name a new one"):
        save_checkpoint(trained(source), load_renderer(source), source)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_a_checkpoint_that_cannot_be_completed_leaves_nothing(tmp_path):
    source = tiny_qwen3_vl(tmp_path / "source")
    model, renderer = trained(source), load_renderer(source)
    (source / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        save_checkpoint(model, renderer, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_adapters_and_renderers_without_files_are_refused(tmp_path):
    source = tiny_qwen3_vl(tmp_path / "source")
    model, renderer = trained(source), load_renderer(source)
    of_objects = create_renderer(AutoTokenizer.from_pretrained(source))
    with pytest.raises(ArgumentError, match=r"load_renderer\(directory\)"):
        save_checkpoint(model, of_objects, tmp_path / "saved")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ArgumentError, match="merge_and_unload"):
        save_checkpoint(adapted, renderer, tmp_path / "saved")
    assert save_checkpoint(adapted.merge_and_unload(), renderer, tmp_path / "saved").is_dir()


def test_a_model_with_adapters_inside_is_refused(tiny_model_dir, tmp_path):
    wrapped = peft.get_peft_model(load_model(tiny_model_dir), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ArgumentError, match=r"adapters of PEFT inside.*merge_and_unload"):
        save_checkpoint(wrapped.base_model.model, load_renderer(tiny_model_dir), tmp_path / "out")
