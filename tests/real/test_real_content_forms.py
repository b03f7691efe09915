"""Message content as strings and as parts: our prompts against those of a real vLLM, which detects the form."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import pytest
from hf_families import FAMILIES
from images import png_url
from make_checkpoint import make_checkpoint
from vllm_server import VLLMServer

from renderers import TemplateRenderer, load_renderer, model_template
from renderers.errors import TemplateError

# Model directories that a render server loads; it needs no weights.
ARCHITECTURES = {"idefics3": "Idefics3ForConditionalGeneration", "llava-next": "LlavaNextForConditionalGeneration"}
STRINGS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN_TEMPLATES = {"qwen3-vl": corpus.templates()["trl/qwen3_vl"], "strings": STRINGS}


def family_directory(name: str, directory: Path) -> Path:
    """The processor of a family, and a configuration of its model with the ids of this tokenizer."""
    family = next(family for family in FAMILIES if family.name == name)
    family.save(directory)
    config = family.tower().config
    config.architectures = [ARCHITECTURES[name]]
    config.text_config.max_position_embeddings = 8192
    definition = json.loads((directory / "tokenizer.json").read_text())
    config.image_token_id = next(t["id"] for t in definition["added_tokens"] if t["content"] == family.embed)
    config.save_pretrained(directory)
    return directory


def qwen_directory(name: str, directory: Path) -> Path:
    make_checkpoint(directory)
    (directory / "chat_template.jinja").write_text(QWEN_TEMPLATES[name], encoding="utf-8")
    return directory


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *QWEN_TEMPLATES])
def served(
    request: pytest.FixtureRequest, vllm_venv: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    name: str = request.param
    make = family_directory if name in ARCHITECTURES else qwen_directory
    directory = make(name, tmp_path_factory.mktemp("content-forms") / name)
    server = VLLMServer.start(vllm_venv, directory, "render", tmp_path_factory.mktemp("vllm"))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def ours(served: VLLMServer) -> TemplateRenderer:
    return load_renderer(served.model_dir)


IMAGE = np.random.default_rng(0).integers(0, 256, (60, 210, 3), dtype=np.uint8)


SHOWN = {"type": "image_url", "image_url": {"url": png_url(IMAGE)}}


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "strings": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Hi\nthere "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And?"},
    ],
    "parts": [
        {"role": "system", "content": text("Be brief.")},
        {"role": "user", "content": text("Hi", " there", "")},
        {"role": "assistant", "content": text("Hello!")},
        {"role": "user", "content": text("And?")},
    ],
    "mixed": [
        {"role": "user", "content": text("Hi", "there")},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": text("So")},
        {"role": "user", "content": text("")},
    ],
}
IMAGED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [SHOWN, *text("Which?")]},
    {"role": "assistant", "content": "That one."},
    {"role": "user", "content": "And"},
    {"role": "assistant", "content": text("This.")},
    {"role": "user", "content": [*text("now"), SHOWN]},
]


def theirs(server: VLLMServer, messages: list[dict[str, Any]]) -> list[int]:
    body = {"model": server.model_name, "messages": messages}
    answer = server.http.post("/v1/chat/completions/render", json=body)
    ids: list[int] = answer.raise_for_status().json()["token_ids"]
    return ids


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_strings_and_parts_make_the_prompt_that_the_server_makes(
    conversation: str, served: VLLMServer, ours: TemplateRenderer
) -> None:
    messages = CONVERSATIONS[conversation]
    assert ours.render(messages, add_generation_prompt=True).token_ids == theirs(served, messages)


def test_images_beside_strings_make_the_prompt_that_the_server_makes(
    served: VLLMServer, ours: TemplateRenderer
) -> None:
    if ours.template.source == STRINGS:
        pytest.skip("a template of strings shows no images")
    rendered = ours.render(IMAGED, add_generation_prompt=True)
    assert rendered.token_ids == theirs(served, IMAGED)
    assert rendered.multi_modal_data is not None
    assert len(rendered.multi_modal_data) == 2


def test_without_conversion_the_prompt_differs_where_the_template_reads_one_form_only(
    served: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: without conversion the comparison above fails."""
    monkeypatch.setattr(model_template, "converting", lambda template: template)
    given = load_renderer(served.model_dir)
    expected = theirs(served, CONVERSATIONS["mixed"])
    try:
        ids = given.render(CONVERSATIONS["mixed"], add_generation_prompt=True).token_ids
    except TemplateError:  # LLaVA-NeXT's template fails on a string, one of strings on a list
        ids = None
    assert (ids == expected) == (given.template.source == QWEN_TEMPLATES["qwen3-vl"])
