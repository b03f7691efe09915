"""Completion of the `rollouts` command in a real bash, on a terminal."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 60.0

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


class Bash:
    """An interactive bash in which completion of `rollouts` is installed as `--show-completion` prints it."""

    def __init__(self, directory: Path) -> None:
        scripts = directory / "bin"
        scripts.mkdir()
        program = scripts / "rollouts"
        program.write_text(f"#!{sys.executable}\nfrom rollouts.cli.main import main\nmain()\n")
        program.chmod(0o755)
        self._directory, self._scripts = directory, scripts

    def __enter__(self) -> Bash:
        self._terminal, child = pty.openpty()
        environment = {**os.environ, "PATH": f"{self._scripts}:{os.environ['PATH']}", "PS1": "$ ", "TERM": "dumb"}
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            cwd=self._directory,
            env=environment,
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
        )
        os.close(child)
        self.type('eval "$(rollouts --show-completion bash)"; echo rea""dy\n')
        self.wait_for("ready")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until the terminal shows `text`."""
        shown, end = "", time.monotonic() + SECONDS
        while text not in shown:
            assert select.select([self._terminal], [], [], max(0.0, end - time.monotonic()))[0], shown
            shown += os.read(self._terminal, 4096).decode(errors="replace")


@pytest.fixture
def bash(tmp_path: Path) -> Iterator[Bash]:
    (tmp_path / "episodes-of-today.mmr").write_text("")
    (tmp_path / "model-of-mine").mkdir()
    with Bash(tmp_path) as shell:
        yield shell


@pytest.mark.slow
def test_tab_completes_commands_options_files_and_model_directories(bash: Bash) -> None:
    bash.type("rollouts vi\t")
    bash.wait_for("view")
    bash.type(" epis\t")
    bash.wait_for("episodes-of-today.mmr")
    bash.type(" --mod\t")
    bash.wait_for("--model")
    bash.type(" model-o\t")
    bash.wait_for("model-of-mine/")
