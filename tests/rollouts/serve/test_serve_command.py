"""The command `rollouts serve`: refused options. What it serves: tests/rollouts/gateway/test_gateway_command.py."""

import pytest
from run_config_files import write_run
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.serve.server import bound_socket
from rollouts.testing import tiny_qwen3_vl


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--engine", "sglang"], "--base-url URL and --engine sglang belong together"),
        (["--api-key-file", "/nonexistent"], "/nonexistent: No such file or directory"),
        (["--port", "0", "--model", "./absent"], "--model: engine.directory: there is no /"),
        (["--port", "0", "--set", "limits.turns=1"], "--set: limits.turns: Extra inputs are not permitted"),
        (
            [
                *("--engine", "vllm", "--base-url", "http://127.0.0.1:1"),
                *("--port", "0", "--api-key-env", "ABSENT_KEY"),
            ],
            "--api-key-env: engine.api_key_env: the environment variable of this name is not set",
        ),
    ],
)
def test_wrong_options_are_one_line_with_the_cure(tiny_model_dir, arguments, message):
    refused = CliRunner().invoke(app, ["serve", "--model", str(tiny_model_dir), *arguments])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: ")
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ([], "serving model (scripted) at http://127.0.0.1:"),
        (["--set", "renderer.model=other", "--name", "policy"], "serving policy (scripted) at http://127.0.0.1:"),
    ],
)
def test_the_engine_of_a_configuration_is_served(tmp_path, monkeypatch, options, served):
    monkeypatch.setattr("rollouts.serve.server.run_server", lambda app, listener, on_ready: on_ready())
    path = write_run(tmp_path)
    tiny_qwen3_vl(tmp_path / "other", weights=False)
    result = CliRunner().invoke(app, ["serve", str(path), "--port", "0", *options])
    assert result.exit_code == 0, result.output
    assert served in result.stdout


def test_a_chat_endpoint_is_not_served(tmp_path):
    options = ["--engine", "openai", "--base-url", "http://127.0.0.1:1/v1", "--model", "m", "--port", "0"]
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 2
    assert "--base-url: engine: a chat endpoint gives no tokens" in result.stderr


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


def test_a_file_that_is_no_record_is_named_before_the_model_is_loaded(tmp_path):
    (tmp_path / "notes.txt").write_text("no record")
    options = ["--port", "0", "--model", str(tmp_path / "absent"), "--record", str(tmp_path / "notes.txt")]
    refused = CliRunner().invoke(app, ["serve", *options])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: {tmp_path / 'notes.txt'}: file does not start with the header")
    assert (tmp_path / "notes.txt").read_text() == "no record"
