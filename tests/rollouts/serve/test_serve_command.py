"""The command `rollouts serve`: refused options. What it serves: tests/rollouts/gateway/test_gateway_command.py."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.serve.server import bound_socket


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--engine", "sglang"], "--base-url URL and --engine sglang belong together"),
        (["--engine", "vllm"], "--base-url URL and --engine vllm belong together"),
        (["--base-url", "http://127.0.0.1:1"], "--base-url URL and --engine vllm belong together"),
        (["--api-key-file", "/nonexistent"], "/nonexistent: No such file or directory"),
        (["--port", "0", "--model", "Qwen/Qwen3-8B"], "there is no directory Qwen/Qwen3-8B; pass that of the model"),
        (
            [
                *("--engine", "vllm", "--base-url", "http://127.0.0.1:1"),
                *("--port", "0", "--upstream-api-key-env", "ABSENT_KEY"),
            ],
            "--upstream-api-key-env ABSENT_KEY: this environment variable is not set",
        ),
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
