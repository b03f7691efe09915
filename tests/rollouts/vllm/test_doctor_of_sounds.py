"""`rollouts doctor` on a server that hears: nothing is wrong, or one fault is planted and found."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from engine_server import EngineVLLM
from server_thread import served

from rollouts.cli.doctor.command import Options, run_checks
from rollouts.cli.doctor.target import Outcome
from rollouts.models.loading import load_model

OPTIONS = Options(reference_gigabytes=0)


@pytest.fixture(scope="module")
def server(tiny_audio_dir):
    with served(EngineVLLM(tiny_audio_dir)) as started:
        yield started


async def wrong(server: EngineVLLM, directory, options=OPTIONS):
    """What failed or is absent, and each reason with its cure."""
    findings = await run_checks(server.base_url, directory, options)
    return {
        finding.check: f"{finding.seen} {finding.cure}"
        for finding in findings
        if finding.outcome in (Outcome.FAILED, Outcome.ABSENT)
    }


def with_settings(directory, tmp_path, **settings):
    """A copy of the directory whose feature extractor has other settings."""
    copy = shutil.copytree(directory, tmp_path / "copy")
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return copy


@pytest.mark.slow
async def test_the_doctor_finds_nothing_wrong_with_a_model_that_hears(server, tiny_audio_dir):
    findings = await run_checks(server.base_url, tiny_audio_dir, OPTIONS._replace(reference_gigabytes=4.0))
    outcomes = {finding.check: finding.outcome for finding in findings}
    for check in ("sound tokens", "sound features", "mismatch, text", "mismatch, sound"):
        assert outcomes[check] is Outcome.OK
    assert Outcome.FAILED not in outcomes.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "check", "reason"),
    [
        ({"sampling_rate": 8_000}, "sound tokens", "ids from the renderer"),
        ({"hop_length": 320}, "sound tokens", "ids from the renderer"),
        ({"n_fft": 512}, "sound features", "input_features is up to"),
    ],
    ids=["rate", "count", "features"],
)
async def test_another_processor_is_found(server, tiny_audio_dir, tmp_path, settings, check, reason):
    found = await wrong(server, with_settings(tiny_audio_dir, tmp_path, **settings))
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
        found = await wrong(started, tiny_audio_dir, OPTIONS._replace(reference_gigabytes=4.0))
    assert found.keys() == {"mismatch, sound"}


@pytest.mark.slow
async def test_a_server_that_takes_no_sounds_lacks_an_option(tiny_audio_dir):
    with served(EngineVLLM(tiny_audio_dir, hears=False)) as started:
        found = await wrong(started, tiny_audio_dir)
    assert found.keys() == {"sound tokens"}
    assert "--limit-mm-per-prompt" in found["sound tokens"]
