"""`rollouts doctor` against a real vLLM: nothing to complain about, and faults that it must find."""

import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result
from vllm_server import VLLMServer

from renderers import load_renderer
from rollouts.cli.doctor.command import doctor
from rollouts.cli.doctor.mismatch_check import mismatch
from rollouts.cli.doctor.rendering_checks import rendering
from rollouts.cli.doctor.target import Finding, Target
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.vllm import ServerCapabilities, VLLMEngine

EVERY_GENERATING = pytest.mark.parametrize(
    "vllm_server", ["float32", "float32-host-normalise", "bfloat16", "bfloat16-host-normalise"], indirect=True
)


def run_doctor(server: VLLMServer, *options: str, directory: Path | None = None, **more) -> Result:
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(
        app, [server.base_url, "--model", str(directory or server.model_dir), "--json", *options], **more
    )


def findings(result: Result) -> dict[str, dict]:
    return json.loads(result.stdout)["findings"]


@EVERY_GENERATING
def test_a_sound_server_passes_every_check(vllm_server):
    result = run_doctor(vllm_server)
    found = findings(result)
    assert {check: one["seen"] for check, one in found.items() if one["outcome"] != "ok"} == {}
    assert result.exit_code == 0
    assert {
        *("server", "served model", "token endpoint", "control routes", "tokenizer", "text tokens"),
        *("image rendering", "text request", "stop token", "log-probabilities", "image request", "mismatch"),
    } == found.keys()


async def test_pixels_normalised_twice_are_found_although_the_server_answers_200(vllm_server, monkeypatch):
    """The trap: floats to a server that normalises on its device."""
    async with _target(vllm_server) as target:
        wrong = replace(target.capabilities, pixel_dtype="float32")

        async def deceived_probe(*_: object, **__: object) -> ServerCapabilities:
            return wrong

        monkeypatch.setattr("rollouts.engines.vllm.engine.probe", deceived_probe)
        engine = VLLMEngine(vllm_server.base_url)
        trapped = replace(target, engine=engine, capabilities=wrong)
        try:
            trapped.findings["image request"] = Finding("ok", "")
            assert "pixel_values is float32" in (await rendering(trapped, modality="image")).seen
            seen = (await mismatch(trapped, max_gigabytes=1)).seen
            assert "too large for image: doubled normalisation: equal when computed with" in seen
        finally:
            await engine.close()


def test_a_directory_with_other_weights_and_another_template_is_found(vllm_server, tmp_path):
    other = Path(shutil.copytree(vllm_server.model_dir, tmp_path / "other"))
    template = other / "chat_template.jinja"
    template.write_text("{{- 'Dear model, ' -}}" + template.read_text())
    change_weights(other, "layers.0.mlp.down_proj.weight", 4.0)
    result = run_doctor(vllm_server, directory=other)
    found = findings(result)
    assert result.exit_code == 1
    assert {check for check, one in found.items() if one["outcome"] == "failed"} == {"text tokens", "mismatch"}
    for check, words in (("text tokens", "--chat-template"), ("mismatch", "from --model")):
        assert words in found[check]["cure"]


@pytest.mark.parametrize("vllm_server", ["float32", "float32-host-normalise", "bfloat16-host-normalise"], indirect=True)
def test_a_wrong_image_mean_is_found_wherever_the_server_normalises(vllm_server, tmp_path):
    other = Path(shutil.copytree(vllm_server.model_dir, tmp_path / "other"))
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(settings | CLIP))
    found = findings(run_doctor(vllm_server, directory=other))
    failed = [check for check, one in found.items() if one["outcome"] == "failed"]
    assert failed
    assert set(failed) <= {"image rendering", "mismatch"}
    if "mismatch" in failed:
        assert "too large for image: " in found["mismatch"]["seen"]
        assert "normalisation: equal when computed with" in found["mismatch"]["seen"]


# Families: each as it is right, and with one mistake in the directory that the server is compared with.


def change_weights(directory: Path, ending: str, factor: float) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    weights = load_file(path)
    (name,) = (name for name in weights if name.endswith(ending))
    save_file({**weights, name: weights[name] * factor}, path, {"format": "pt"})


def change_json(path: Path, part: str, **changes: object) -> None:
    content = json.loads(path.read_text())
    content[part] = content[part] | changes
    path.write_text(json.dumps(content))


def change_images(directory: Path, **changes: object) -> None:
    change_json(directory / "processor_config.json", "image_processor", **changes)


def fold_logit_scale(directory: Path) -> None:
    """The same model for a class that does not read `logit_scale`: the last norm has the factor."""
    change_weights(directory, "language_model.norm.weight", 0.25)
    change_json(directory / "config.json", "text_config", logit_scale=1.0)


def nothing(directory: Path) -> None:
    pass


Findings = Mapping[str, str]  # by check, words that its result or its cure has
AS_FILES: Findings = {"image rendering": "content_parts"}
# vLLM's attention for the CPU has no bidirectional ranges, so a server of Gemma 3 is never right here.
ON_CPU: Findings = {"mismatch": "too large for image: no fault that was tested explains it"}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


@pytest.mark.parametrize(
    ("vllm_server", "edit", "failed", "others"),
    [
        ("gemma3", nothing, ON_CPU, {}),
        ("glm-4.5v", nothing, {}, {}),
        (
            "glm-4.5v",
            lambda directory: change_images(directory, size={"shortest_edge": 448 * 448, "longest_edge": 2**22}),
            {"image rendering": "files of the processor"},
            {"image request": "image rendering failed"},
        ),
        ("internvl3", nothing, {}, AS_FILES),
        (
            "internvl3",
            lambda directory: change_images(directory, **HALF),
            {"mismatch": "too large for image: other normalisation: equal when computed with"},
            AS_FILES,
        ),
        ("idefics3", nothing, {}, AS_FILES),
        (
            "idefics3",
            lambda directory: change_weights(directory, "patch_embedding.weight", 1.5),
            {"mismatch": "too large for image: no fault that was tested explains it"},
            AS_FILES,
        ),
        ("llava-onevision", nothing, {}, {}),
        (
            "llava-onevision",
            lambda directory: change_images(directory, resample=0),
            {"image rendering": "files of the processor"},
            {"image request": "image rendering failed"},
        ),
        ("cohere2-vision", fold_logit_scale, {}, AS_FILES),
        (
            "cohere2-vision",
            nothing,
            {"mismatch": "too large for text and image: wrong temperature: equal when computed with a temperature of"},
            AS_FILES,
        ),
        ("qwen2.5-vl", nothing, {}, {}),
        (
            "qwen2.5-vl",
            lambda directory: change_json(
                directory / "config.json",
                "text_config",
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 100.0,
                    "mrope_section": [4, 6, 6],
                },
            ),
            {"mismatch": "overrides of its config.json"},
            {},
        ),
    ],
    indirect=["vllm_server"],
    scope="session",  # else pytest stops the server after each test
)
def test_a_family_passes_as_it_is_and_a_mistake_is_named(vllm_server, edit, failed, others, tmp_path):
    directory = Path(shutil.copytree(vllm_server.model_dir, tmp_path / "compared"))
    edit(directory)
    found = findings(run_doctor(vllm_server, directory=directory))
    wrong = {check: f"{one['seen']} -> {one['cure']}" for check, one in found.items() if one["outcome"] == "failed"}
    assert wrong.keys() == failed.keys(), wrong
    rest = {check: one for check, one in found.items() if one["outcome"] not in ("ok", "failed")}
    assert rest.keys() == others.keys(), rest
    for check, words in {**failed, **others}.items():
        assert words in f"{found[check]['seen']} -> {found[check]['cure']}"


@pytest.mark.parametrize("vllm_server", ["short"], indirect=True)
def test_a_limit_that_no_image_fits_into_is_named_and_nothing_is_blamed_on_it(vllm_server):
    found = findings(run_doctor(vllm_server))
    assert [check for check, one in found.items() if one["outcome"] == "failed"] == ["served model"]
    assert "--max-model-len 8192" in found["served model"]["cure"]
    assert found["image request"]["outcome"] == "skipped"
    assert found["text request"]["outcome"] == "ok"


@pytest.mark.parametrize("vllm_server", ["raw-logits"], indirect=True)
def test_logits_in_place_of_log_probabilities_are_found(vllm_server):
    found = findings(run_doctor(vllm_server))
    failed = {check: one["cure"] for check, one in found.items() if one["outcome"] == "failed"}
    assert failed.keys() <= {"text request", "log-probabilities"}
    assert all("--logprobs-mode raw_logprobs" in cure for cure in failed.values())
    assert failed


@pytest.mark.parametrize("vllm_server", ["without-images"], indirect=True)
def test_processed_log_probabilities_are_found_and_that_images_are_refused_is_told(vllm_server):
    found = findings(run_doctor(vllm_server))
    assert [check for check, one in found.items() if one["outcome"] == "failed"] == ["log-probabilities"]
    assert "--logprobs-mode raw_logprobs" in found["log-probabilities"]["cure"]
    assert found["image rendering"]["outcome"] == "absent"
    assert "--limit-mm-per-prompt" in found["image rendering"]["cure"]


@pytest.mark.parametrize("vllm_server", ["closed"], indirect=True)
def test_a_closed_server_is_told_what_to_open_and_its_key_is_never_shown(vllm_server):
    key = vllm_server.api_key
    result = run_doctor(vllm_server, "--api-key-env", "THE_KEY", env={"THE_KEY": key})
    found = findings(result)
    assert result.exit_code == 1
    assert found["token endpoint"]["outcome"] == "failed"
    assert "--enable-scale-out" in found["token endpoint"]["cure"]
    assert found["control routes"]["outcome"] == "absent"
    assert found["text tokens"]["outcome"] == "ok"
    assert {check for check, one in found.items() if one["outcome"] == "failed"} == {"token endpoint"}
    assert not any("takes no images" in one["seen"] for one in found.values())
    assert key not in result.output
    wrong = run_doctor(vllm_server, "--api-key-env", "THE_KEY", env={"THE_KEY": "wrong-key-5"})
    assert wrong.exit_code == 2
    assert "wrong-key-5" not in wrong.output
    assert "THE_KEY" in wrong.output
    assert "--api-key-env" in run_doctor(vllm_server).output


@asynccontextmanager
async def _target(server: VLLMServer) -> AsyncIterator[Target]:
    engine = VLLMEngine(server.base_url)
    connection = ServerConnection(server.base_url)
    try:
        renderer, capabilities = load_renderer(server.model_dir), await engine.capabilities()
        yield Target("vllm", engine, connection, renderer, server.model_dir, capabilities, "float32")
    finally:
        await engine.close()
        await connection.close()
