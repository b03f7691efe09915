"""Loading an HFProcessor: code of the directory never runs, and errors name the file, the package or the token."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from processor_outputs import BY_NAME, copy_with_config, load_processors
from transformers import AutoProcessor

from renderers import load_renderer
from renderers.errors import LoadError, MessageError, MissingExtraError
from renderers.installation import install_command

TEMPLATE = (
    "{% for m in messages %}[INST]{{ m.content if m.content is string else '[IMG]' }}[/INST]{% endfor %}"
    "{% if add_generation_prompt %}[INST]{% endif %}"
)


def model_directory(files: dict[str, Any], tokenizer: Path, directory: Path) -> Path:
    """A directory with these JSON files and the tokenizer of another one."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory / name)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config.pop("processor_class", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("processor_config.json", "AutoProcessor"),
        ("preprocessor_config.json", "AutoImageProcessor"),
        ("tokenizer_config.json", "AutoTokenizer"),
        ("tokenizer_config.json", "planted.Planted"),
        ("config.json", "AutoProcessor"),
    ],
)
def test_code_of_a_directory_is_refused_and_not_run(
    processor_directory: Any, tmp_path: Path, filename: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copy_with_config(processor_directory("pixtral"), tmp_path / "model", lambda config: None)
    witness = tmp_path / "was-run"
    (directory / "planted.py").write_text(f"open({str(witness)!r}, 'w')\nclass Planted: pass\n")
    path = directory / filename
    config = json.loads(path.read_text()) if path.is_file() else {}
    config["auto_map"] = {name: "planted.Planted"} if name.startswith("Auto") else ["planted.Planted", None]
    config.pop("processor_class", None)
    path.write_text(json.dumps(config))

    monkeypatch.setattr("builtins.input", lambda *_: "y")  # who is asked might say yes
    with pytest.raises(LoadError, match=f"{filename}.*{name}.* is code of the repository.*-hf.*server render"):
        load_processors(directory)
    assert not witness.exists()


def test_the_planted_code_would_run_if_it_were_trusted(
    processor_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    witness = tmp_path / "was-run"

    def plant(config: dict[str, Any]) -> None:
        del config["processor_class"]
        config["auto_map"] = {"AutoProcessor": "planted.Planted"}

    directory = copy_with_config(processor_directory("pixtral"), tmp_path / "model", plant)
    (directory / "planted.py").write_text(f"open({str(witness)!r}, 'w')\nclass Planted: pass\n")
    with pytest.raises(AttributeError, match="register_for_auto_class"):
        AutoProcessor.from_pretrained(directory, trust_remote_code=True)
    assert witness.exists()


@pytest.mark.slow
def test_loading_makes_no_network_connection(processor_directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = processor_directory("gemma4")

    def refuse(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"network: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert set(load_processors(directory)) == {"image", "video", "audio"}


def test_an_audio_tokenizer_of_another_repository_is_refused(processor_directory: Any, tmp_path: Path) -> None:
    def plant(config: dict[str, Any]) -> None:
        config["audio_tokenizer"] = {"audio_tokenizer_name_or_path": "someone/something"}

    with pytest.raises(LoadError, match=r"processor_config\.json: audio_tokenizer names another model"):
        load_processors(copy_with_config(processor_directory("pixtral"), tmp_path / "model", plant))


@pytest.mark.parametrize("package", ["torch", "torchvision", "transformers"])
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    processor_directory: Any, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    directory = processor_directory("pixtral")  # which takes the packages to write it
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.*{re.escape(install_command('processors'))}"):
        load_processors(directory)


@pytest.mark.skipif(BY_NAME["smolvlm"].runs_here, reason="num2words is installed")
def test_a_missing_package_that_one_processor_needs_is_named(tmp_path: Path, processor_directory: Any) -> None:
    def plant(config: dict[str, Any]) -> None:
        config["processor_class"] = "SmolVLMProcessor"
        config["image_processor"]["image_processor_type"] = "SmolVLMImageProcessor"
        config["video_processor"]["video_processor_type"] = "SmolVLMVideoProcessor"

    with pytest.raises(MissingExtraError, match="num2words"):
        load_processors(copy_with_config(processor_directory("kimi-k2.5"), tmp_path / "model", plant))


def test_a_processor_file_that_is_no_json_is_named(processor_directory: Any, tmp_path: Path) -> None:
    directory = copy_with_config(processor_directory("pixtral"), tmp_path / "model", lambda config: None)
    (directory / "processor_config.json").write_text("{")
    with pytest.raises(LoadError, match=r"processor_config\.json: not readable as JSON"):
        load_processors(directory)


@pytest.mark.parametrize("name", ["DeepseekVLV2Processor", "OvisProcessor"])
def test_a_processor_class_that_transformers_lacks_needs_code_of_the_repository(
    processor_directory: Any, tmp_path: Path, name: str
) -> None:
    def plant(config: dict[str, Any]) -> None:
        config["processor_class"] = name

    with pytest.raises(LoadError, match=f"has no {name}: .*code of the model's own repository") as caught:
        load_processors(copy_with_config(processor_directory("pixtral"), tmp_path / "model", plant))
    assert "upgrade" not in str(caught.value).lower()


CLIP = {"feature_extractor_type": "CLIPFeatureExtractor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 448}
SIGLIP = {"image_processor_type": "SiglipImageProcessor", "image_mean": [0.5] * 3, "size": {"height": 32, "width": 32}}
DEEPSEEK_VL2 = {"processor_class": "DeepseekVLV2Processor", "image_token": "<image>", "image_mean": [0.5] * 3}
CODE = {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}}


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        (
            {"processor_config.json": DEEPSEEK_VL2},
            "has no DeepseekVLV2Processor: unless a newer one has it, it is code of",
        ),
        (
            {"preprocessor_config.json": SIGLIP, "config.json": {"model_type": "ovis", **CODE}},
            "auto_map in config.json",
        ),
        (
            {"preprocessor_config.json": CLIP, "config.json": {"model_type": "internvl_chat", **CODE}},
            "auto_map in config",
        ),
        (
            {"preprocessor_config.json": {**SIGLIP, "image_processor_type": "NoSuchImageProcessor"}},
            "has no NoSuchImageProcessor: unless a newer one has it",
        ),
    ],
    ids=["DeepSeek-VL2", "Ovis", "InternVL", "image processor"],
)
def test_a_processor_that_is_code_of_the_repository_is_refused_with_what_can_be_done(
    files: dict[str, Any], cause: str, processor_directory: Any, tmp_path: Path
) -> None:
    """The files as the models were published: none names code of a processor in `auto_map`."""
    directory = model_directory(files, processor_directory("pixtral"), tmp_path / "model")
    image = {"type": "image", "image": np.zeros((32, 32, 3), np.uint8)}
    with pytest.raises(MessageError, match=f"{cause}.*which is never run here") as caught:
        load_renderer(directory, chat_template=TEMPLATE).render([{"role": "user", "content": [image]}])
    for cure in ("named -hf", "let the inference server render (docs/vllm.md)", r"processors=...) (docs/media.md)"):
        assert cure in str(caught.value)
    assert "pgrade" not in str(caught.value)


@pytest.mark.parametrize("kind", ["SiglipImageProcessor", "SiglipImageProcessorFast"])
def test_a_directory_that_names_no_processor_and_no_code_is_to_name_one(
    kind: str, processor_directory: Any, tmp_path: Path
) -> None:
    files = {"preprocessor_config.json": {**SIGLIP, "image_processor_type": kind}}
    directory = model_directory(files, processor_directory("pixtral"), tmp_path / "model")
    with pytest.raises(
        LoadError, match=r"Correct processor_class in processor_config\.json.*; else .*let the inference server render"
    ) as e:
        load_processors(directory)
    assert "never run" not in str(e.value)


def test_settings_of_audio_alone_are_those_of_a_model_that_reads_text(processor_directory: Any, tmp_path: Path) -> None:
    files = {"preprocessor_config.json": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}}
    directory = model_directory(files, processor_directory("pixtral"), tmp_path / "model")
    assert not load_renderer(directory, chat_template=TEMPLATE).processors


def test_a_processor_that_loads_as_a_tokenizer_only_is_refused(processor_directory: Any, tmp_path: Path) -> None:
    directory = copy_with_config(processor_directory("pixtral"), tmp_path / "model", lambda config: None)
    (directory / "processor_config.json").unlink()
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["processor_class"]
    path.write_text(json.dumps(config))
    with pytest.raises(LoadError, match="name no processor_class"):
        load_processors(directory)


def test_settings_that_the_processor_rejects_are_refused(processor_directory: Any, tmp_path: Path) -> None:
    def plant(config: dict[str, Any]) -> None:
        config["image_processor"]["size"] = {"nonsense": 3}

    with pytest.raises(LoadError, match=r"cannot load the processor of .*model: .*nonsense"):
        load_processors(copy_with_config(processor_directory("pixtral"), tmp_path / "model", plant))


def test_a_tokenizer_that_cannot_be_read_is_refused(processor_directory: Any, tmp_path: Path) -> None:
    directory = copy_with_config(processor_directory("pixtral"), tmp_path / "model", lambda config: None)
    (directory / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "nonsense"}}')
    with pytest.raises(LoadError, match="cannot load the processor"):
        load_processors(directory)


def test_a_marker_that_is_no_control_token_is_refused(processor_directory: Any, tmp_path: Path) -> None:
    def plant(config: dict[str, Any]) -> None:
        config["image_token"] = "[IMAGE]"

    with pytest.raises(LoadError, match=r"\[IMAGE\].*PixtralProcessor"):
        load_processors(copy_with_config(processor_directory("pixtral"), tmp_path / "model", plant))


@pytest.mark.slow
def test_a_config_that_names_another_embed_token_is_refused(
    processor_directory: Any, reference_processor: Any, tmp_path: Path
) -> None:
    directory = copy_with_config(processor_directory("pixtral"), tmp_path / "model", lambda config: None)
    ids = reference_processor("pixtral").tokenizer.get_vocab()
    (directory / "config.json").write_text(json.dumps({"image_token_index": ids["[IMG]"]}))
    assert load_processors(directory)["image"].embed_token == "[IMG]"
    (directory / "config.json").write_text(json.dumps({"image_token_index": ids["[IMG_END]"]}))
    with pytest.raises(LoadError, match=r"config\.json names \[IMG_END\]"):
        load_processors(directory)
