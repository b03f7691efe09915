"""A missing or wrong API key: the command line names its own option, the Python interface its own argument."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from fake_http import error_response
from fake_server import FakeVLLM
from server_thread import served
from typer.testing import CliRunner

from rollouts import GenerateRequest, SamplingParams
from rollouts.cli.doctor.command import doctor
from rollouts.demo.trainer import ServerPolicy
from rollouts.errors import ApiKeyError

KEY = "the-right-secret"


@pytest.fixture
def guarded() -> Iterator[str]:
    """The address of a server on a thread of its own: the command runs an event loop itself."""
    with served(FakeVLLM(api_key=KEY)) as server:
        yield server.base_url


@pytest.mark.parametrize(
    ("options", "key", "named"),
    [
        ([], "", "--api-key-env"),
        (["--api-key-env", "THE_KEY"], "a-wrong-secret", "THE_KEY"),
        (["--api-key-env", "THE_KEY"], "", "--api-key-env THE_KEY"),
    ],
    ids=["no key", "another key", "an empty variable"],
)
def test_the_command_names_its_own_option_or_variable(
    guarded: str, tiny_model_dir: Path, options: list[str], key: str, named: str
) -> None:
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, [guarded, "--model", str(tiny_model_dir), *options], env={"THE_KEY": key})
    assert result.exit_code == 2
    assert named in result.output
    assert "api_key=" not in result.output
    assert "secret" not in result.output


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 2), ("/tokenize", 1)], ids=["error", "finding"])
def test_the_doctor_shows_no_key_that_a_server_quotes(tiny_model_dir: Path, path: str, status: int) -> None:
    app = typer.Typer()
    app.command()(doctor)
    options = ["--model", str(tiny_model_dir), "--api-key-env", "THE_KEY", "--reference-gb", "0"]
    with served(FakeVLLM(api_key=KEY)) as server:
        server.script[path] = [error_response(500, f"not for {KEY}")] * 9
        result = CliRunner().invoke(app, [server.base_url, *options], env={"THE_KEY": KEY})
    assert result.exit_code == status
    assert "not for " in result.output
    assert KEY not in result.output


@pytest.mark.parametrize("key", [None, "wrong", KEY])
def test_the_policy_of_demo_sends_its_key(guarded: str, tmp_path: Path, key: str | None) -> None:
    async def generate() -> None:
        policy = ServerPolicy(guarded, key, tmp_path / "model")
        try:
            await policy.generate(GenerateRequest([1, 2, 3], SamplingParams(max_tokens=2)))
        finally:
            await policy.close()

    if key == KEY:
        asyncio.run(generate())
    else:
        with pytest.raises(ApiKeyError):
            asyncio.run(generate())
