"""The command `rollouts serve`: readiness, interrupt, refused options."""

from __future__ import annotations

import asyncio
import signal

import pytest
from served_process import SECONDS, served_process
from test_served_engine import TEXT, request_of
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.engines.vllm import VLLMEngine
from rollouts.serve.server import bound_socket


async def test_the_command_says_when_it_is_ready_and_ends_with_an_interrupt(tiny_model_dir, renderer):
    async with served_process(tiny_model_dir, "--name", "tiny") as server:
        async with VLLMEngine(server.base_url) as engine:
            assert (await engine.capabilities()).model == "tiny"
            (completion,) = (await engine.generate(request_of(renderer, TEXT))).completions
            assert len(completion.token_ids) == 12
        server.process.send_signal(signal.SIGINT)
        output, errors = await asyncio.wait_for(server.process.communicate(), SECONDS)
    assert (server.process.returncode, output) == (130, b"")
    assert b"Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--engine", "vllm"], "--base-url URL and --engine vllm belong together"),
        (["--base-url", "http://127.0.0.1:1"], "--base-url URL and --engine vllm belong together"),
        (["--api-key-file", "/nonexistent"], "--api-key-file /nonexistent: No such file or directory"),
    ],
)
def test_wrong_options_are_one_line_with_the_cure(tiny_model_dir, arguments, message):
    refused = CliRunner().invoke(app, ["serve", "--model", str(tiny_model_dir), *arguments])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: ")
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_port_in_use_is_an_error_before_the_model_is_loaded(tmp_path):
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = CliRunner().invoke(app, ["serve", "--model", str(tmp_path / "absent"), "--port", port])
    assert refused.exit_code == 2
    assert refused.stderr == (
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use. Pass --port 0 for any free port, or "
        "another\n"
    )
