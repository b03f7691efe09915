"""Errors that concern a server end with the command that checks it, and never have its key."""

import traceback
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from engine_inputs import FAST_RETRIES, request
from fake_http import Response, error_response
from fake_responses import change, reset
from fake_server import GENERATE, FakeVLLM
from server_thread import served
from typer.testing import CliRunner

from rollouts import GenerateRequest, SamplingParams, run_episode
from rollouts.cli.command_group import APP_SETTINGS, CommandGroup
from rollouts.cli.doctor.command import doctor
from rollouts.engines.vllm import VLLMEngine
from rollouts.environments import ScoredPrompt
from rollouts.episodes.errors import EpisodeError
from rollouts.errors import (
    ApiKeyError,
    CapabilityError,
    ContextLengthError,
    MalformedResultError,
    MissingLogProbsError,
    ServerError,
    ServerUnreachableError,
    WeightUpdateError,
    no_server,
)

BASIC = "Basic c29tZW9uZTpzd29yZGZpc2g="


def check_of(url: str) -> str:
    return f"to check the server: rollouts doctor {url} --model DIR"


def last_line(error: BaseException) -> str:
    return traceback.format_exception(error)[-1].rstrip().splitlines()[-1]


async def generate(engine: VLLMEngine) -> object:
    return await engine.generate(request())


async def generate_after_a_prompt_of_4096_tokens(engine: VLLMEngine) -> object:
    return await engine.generate(GenerateRequest([1] * 4096, SamplingParams()))


async def update(engine: VLLMEngine) -> object:
    return await engine.update_weights("no-such-directory", "1")


@pytest.mark.parametrize(
    ("options", "steps", "call", "error_class"),
    [
        ({}, [error_response(500)] * 9, generate, ServerError),
        ({}, [reset()] * 9, generate, ServerUnreachableError),
        ({}, [Response(body=b'{"choices": [')], generate, MalformedResultError),
        ({}, [change(lambda content: content["choices"][0].update(logprobs=None))], generate, MissingLogProbsError),
        ({}, [], generate_after_a_prompt_of_4096_tokens, ContextLengthError),
        ({"scale_out": False}, [], generate, CapabilityError),
        ({"api_key": "open-sesame"}, [], generate, ApiKeyError),
        ({}, [], update, WeightUpdateError),
    ],
)
async def test_an_error_at_a_server_ends_with_the_command(
    options: dict[str, Any], steps: list[Any], call: Callable[[VLLMEngine], Awaitable[object]], error_class: type
) -> None:
    async with FakeVLLM(**options) as server:
        with_key = server.base_url.replace("http://", "http://someone:swordfish@")
        async with VLLMEngine(with_key, limits=FAST_RETRIES) as engine:
            if steps:  # for the request itself, not for the questions about capabilities before it
                await engine.capabilities()
                server.script[GENERATE] = steps
            with pytest.raises(error_class) as caught:
                await call(engine)
    assert {seen.headers["authorization"] for seen in server.requests} <= {BASIC}
    assert last_line(caught.value) == check_of(server.base_url)
    assert "swordfish" not in "".join(traceback.format_exception(caught.value))


def test_the_commands_for_many_servers_are_those_of_the_first_three() -> None:
    urls = [f"http://host{number}:8000" for number in range(9)]
    error = no_server("turn", {url: ServerUnreachableError("turn", "down").concern(url) for url in urls})
    assert error.servers == tuple(urls)
    assert error.__notes__ == [check_of(url) for url in urls[:3]]


async def test_the_error_of_an_episode_ends_with_the_command(renderer: Any) -> None:
    environment = ScoredPrompt(None, lambda task: [{"role": "user", "content": "Hello"}], lambda completion, task: 0)
    async with FakeVLLM(scale_out=False) as server, VLLMEngine(server.base_url) as engine:
        with pytest.raises(EpisodeError) as caught:
            await run_episode(environment, engine=engine, renderer=renderer, sampling=SamplingParams(), max_turns=1)
    assert caught.value.trajectory.error.endswith(f"; {check_of(server.base_url)}")


def test_a_command_that_fails_prints_it() -> None:
    commands = typer.Typer(cls=CommandGroup, **APP_SETTINGS)

    @commands.command()
    def fail() -> None:
        raise ServerUnreachableError("turn", "down").concern("http://host:8000")

    @commands.command()
    def other() -> None:
        pass

    result = CliRunner().invoke(commands, ["fail"])
    assert result.exit_code == 2
    assert result.output.endswith(f"down; {check_of('http://host:8000')}\n")


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
