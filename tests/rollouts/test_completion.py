"""Completion of the `rollouts` command, as the script that `--show-completion` prints asks for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts"
    path.write_text("from rollouts.cli.main import main\nmain()\n")
    return path


def output(program: Path, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(program), *arguments]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return result.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rollouts vi", ["view"]),
        ("rollouts view episodes.mmr --mod", ["--model"]),
        # Nothing: the shell completes names of files and directories itself.
        ("rollouts view epis", []),
        ("rollouts view episodes.mmr --model mod", []),
    ],
)
def test_commands_and_options_are_completed_and_paths_left_to_the_shell(
    program: Path, words: str, expected: list[str]
) -> None:
    request = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert output(program, _ROLLOUTS_COMPLETE="complete_bash", **request).split() == expected


def test_the_shell_completes_paths_where_nothing_is_suggested(program: Path) -> None:
    assert "complete -o default -F" in output(program, "--show-completion", "bash")
