"""`rollouts doctor` on a server that hears: nothing is wrong, or one fault is planted and found."""

import json
import shutil

import pytest
import torch
from engine_server import EngineVLLM
from safetensors.torch import load_file, save_file
from server_thread import served

from rollouts.cli.doctor.command import run_checks
from rollouts.models.loading import load_model


@pytest.fixture(scope="module")
def server(tiny_audio_dir):
    with served(EngineVLLM(tiny_audio_dir)) as started:
        yield started


async def wrong(server: EngineVLLM, directory, **options):
    """What failed or is absent, and each reason with its cure."""
    findings = await run_checks(server.base_url, directory, **options)
    return {
        check: f"{found.seen} {found.cure}"
        for check, found in findings.items()
        if found.outcome in ("failed", "absent")
    }


def with_settings(directory, tmp_path, **settings):
    """A copy of the directory whose feature extractor has other settings."""
    copy = shutil.copytree(directory, tmp_path / "copy")
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return copy


@pytest.mark.slow
async def test_the_doctor_finds_nothing_wrong_with_a_model_that_hears(server, tiny_audio_dir):
    findings = await run_checks(server.base_url, tiny_audio_dir)
    assert {found.outcome for found in findings.values()} == {"ok"}
    assert {"sound rendering", "sound request", "mismatch"} < findings.keys()
    assert "; audio " in findings["mismatch"].seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "check", "reason"),
    [
        ({"sampling_rate": 8_000}, "sound rendering", "ids from the renderer"),
        ({"hop_length": 320}, "sound rendering", "ids from the renderer"),
        ({"n_fft": 512}, "sound rendering", "input_features is up to"),
        ({"feature_size": 64}, "sound rendering", "input_features is float32 (64, 200)"),  # no request would succeed
    ],
    ids=["rate", "count", "features", "size"],
)
async def test_another_processor_is_found_once(server, tiny_audio_dir, tmp_path, settings, check, reason):
    directory = with_settings(tiny_audio_dir, tmp_path, **settings)
    found = await wrong(server, directory)
    assert found.keys() == {check}
    assert reason in found[check]
    assert "copy the files of the processor" in found[check]


@pytest.mark.slow
async def test_a_server_that_ignores_sounds_is_found(tiny_audio_dir, tmp_path):
    model = load_model(tiny_audio_dir)
    with torch.no_grad():
        for parameter in model.model.multi_modal_projector.parameters():
            parameter.zero_()
    deaf = shutil.copytree(tiny_audio_dir, tmp_path / "deaf")
    model.save_pretrained(deaf)
    with served(EngineVLLM(deaf)) as started:
        found = await wrong(started, tiny_audio_dir)
    assert found.keys() == {"sound request"}
    assert "two different sounds give exactly the same completion" in found["sound request"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers.0.fc1.weight", "layers.0.self_attn.q_proj.weight"])
async def test_other_weights_of_the_sound_tower_are_found(server, tiny_audio_dir, tmp_path, name):
    other = shutil.copytree(tiny_audio_dir, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file(
        {**weights, f"audio_tower.{name}": weights[f"audio_tower.{name}"] * 1.5},
        other / "model.safetensors",
        {"format": "pt"},
    )
    found = await wrong(server, other)
    assert found.keys() == {"mismatch"}
    assert "too large for audio: " in found["mismatch"]


@pytest.mark.slow
async def test_sounds_that_a_server_never_takes_are_an_option_that_it_lacks(tiny_audio_dir):
    with served(EngineVLLM(tiny_audio_dir, rust_frontend="0.33.0")) as started:
        found = await wrong(started, tiny_audio_dir, reference_gigabytes=0)
    assert found.keys() == {"sound request"}
    assert "VLLM_USE_RUST_FRONTEND=0" in found["sound request"]
