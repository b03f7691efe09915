"""`rollouts doctor` against a scripted SGLang server."""

from pathlib import Path

import pytest
from fake_sglang import FakeSGLang

from renderers import load_renderer
from rollouts.cli.doctor.command import run_checks
from rollouts.cli.doctor.target import Finding


async def findings_of(server: FakeSGLang, directory: Path) -> dict[str, Finding]:
    """By check, without the comparison with transformers, from which scripted completions differ."""
    return await run_checks(server.base_url, directory, reference_gigabytes=0)


@pytest.fixture
def serves_tiny_model(server: FakeSGLang, tiny_model_dir: Path) -> FakeSGLang:
    server.tokenize = load_renderer(tiny_model_dir).tokenizer.encode_scaffold
    server.vocabulary, server.tokens_of_an_image = 288, 96
    server.prompt_logprob = lambda token: -float(token)  # as those of sampled tokens
    return server


async def test_the_kind_of_server_is_recognised_and_what_it_lacks_is_named(
    serves_tiny_model: FakeSGLang, tiny_model_dir: Path
) -> None:
    found = await findings_of(serves_tiny_model, tiny_model_dir)
    wrong = {name: finding.outcome for name, finding in found.items() if finding.outcome in ("absent", "failed")}
    assert wrong == {"log-probabilities": "absent", "image request": "failed"}
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB=1" in found["log-probabilities"].cure
    assert "two different images give exactly the same completion" in found["image request"].seen


async def test_a_server_with_all_options_has_nothing_to_name(
    serves_tiny_model: FakeSGLang, tiny_model_dir: Path
) -> None:
    server = serves_tiny_model
    server.temperature_in_logprobs = False
    found = await findings_of(server, tiny_model_dir)
    for check in ("server", "vocabulary", "text request", "log-probabilities"):
        assert found[check].outcome == "ok", found[check]


async def test_a_prompt_that_is_tokenised_again_is_a_failure(
    serves_tiny_model: FakeSGLang, tiny_model_dir: Path
) -> None:
    serves_tiny_model.tokens_of_an_image = 95
    finding = (await findings_of(serves_tiny_model, tiny_model_dir))["image request"]
    assert finding.outcome == "failed"
    assert "the first difference is token" in finding.seen


async def test_another_vocabulary_and_another_version_are_named(
    serves_tiny_model: FakeSGLang, tiny_model_dir: Path
) -> None:
    serves_tiny_model.vocabulary = 300
    serves_tiny_model.info["version"] = "0.5.9"
    found = await findings_of(serves_tiny_model, tiny_model_dir)
    assert found["vocabulary"].seen == "the server has 300 tokens, config.json of --model 288"
    assert found["text request"].outcome == "skipped"
    assert "none of the versions that mmrollouts knows, 0.5.23" in found["server"].seen


async def test_prompts_that_are_scored_in_another_way_are_a_failure(
    serves_tiny_model: FakeSGLang, tiny_model_dir: Path
) -> None:
    serves_tiny_model.prompt_logprob = lambda token: -9.0
    finding = (await findings_of(serves_tiny_model, tiny_model_dir))["log-probabilities"]
    assert finding.outcome == "failed"
    assert "of the same tokens as a prompt" in finding.seen


async def test_a_sound_that_sglang_cannot_take_and_another_tokenizer_are_named(
    serves_tiny_model: FakeSGLang, tiny_audio_dir: Path
) -> None:
    found = await findings_of(serves_tiny_model, tiny_audio_dir)  # whose tokenizer is another one
    assert "--tokenizer-path" in found["tokenizer"].cure
    assert found["tokenizer"].outcome == "failed"
    assert found["sound request"].outcome == "absent"
    assert "SGLang tokenises a prompt with audio again" in found["sound request"].seen
