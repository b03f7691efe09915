"""Loading an HFProcessor: code of the directory never runs, and errors name the file, the package or the token."""

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from processor_outputs import copy_with_config, load_processors
from transformers import AutoProcessor

from renderers.errors import LoadError, MissingExtraError
from renderers.installation import install_command

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("preprocessor_config.json", "AutoImageProcessor"),
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


@pytest.mark.parametrize("package", ["torch", "torchvision", "transformers"])
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    processor_directory: Any, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    directory = processor_directory("pixtral")  # which takes the packages to write it
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.*{re.escape(install_command('processors'))}"):
        load_processors(directory)


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
