"""The command `rollouts serve`: start, readiness, interrupt, refusals, and a fleet of which one server is killed."""

from __future__ import annotations

import asyncio
import signal

import numpy as np
import pytest
from served_process import SECONDS, served_process, start
from test_served_engine import TEXT, image_messages, request_of

from rollouts import SamplingParams, run_episode
from rollouts.engines.fleet import EngineFleet, FleetLimits
from rollouts.engines.vllm import HttpLimits, VLLMEngine
from rollouts.environments import ScoredPrompt
from rollouts.serve.server import bound_socket


async def ended(process):
    """Exit code, standard output and standard error of a process that ends."""
    output, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    return process.returncode, output.decode(), errors.decode()


async def test_the_command_says_when_it_is_ready_and_ends_with_an_interrupt(tiny_model_dir, renderer):
    async with served_process(tiny_model_dir, "--name", "tiny") as server:
        async with VLLMEngine(server.base_url) as engine:
            assert (await engine.capabilities()).model == "tiny"
            (completion,) = (await engine.generate(request_of(renderer, TEXT))).completions
            assert len(completion.token_ids) == 12
        server.process.send_signal(signal.SIGINT)
        code, output, errors = await ended(server.process)
    assert (code, output) == (130, "")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--engine", "vllm"], "--base-url URL and --engine vllm belong together"),
        (["--base-url", "http://127.0.0.1:1"], "--base-url URL and --engine vllm belong together"),
        (["--api-key-file", "/nonexistent"], "--api-key-file /nonexistent: No such file or directory"),
    ],
)
async def test_wrong_options_are_one_line_with_the_cure(tiny_model_dir, arguments, message):
    code, output, errors = await ended(await start("--model", str(tiny_model_dir), *arguments))
    assert (code, output) == (2, "")
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1


async def test_a_port_in_use_is_an_error_before_the_model_is_loaded(tmp_path):
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, errors = await ended(await start("--model", str(tmp_path / "absent"), "--port", port))
    assert code == 2
    assert errors == (
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use. Pass --port 0 for any free port, or "
        "another\n"
    )
