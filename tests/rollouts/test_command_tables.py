"""The tables of the commands on terminals of 80 columns, of 40 and 44 and in a pipe: no number is cut."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from trajectory_files import file_of, short
from typer.testing import CliRunner

from rollouts.cli.doctor.target import failed, ok, print_findings
from rollouts.cli.main import app

EPISODES = [short("digits-0-3-1"), short("f47ac10b-58cc-4372-a567-0e02b2c3d479", 9)]


@pytest.fixture
def trajectory_file(tmp_path: Path) -> Path:
    return file_of(tmp_path / "t.mmr", *EPISODES)


def printed(path: Path, width: int | None) -> list[str]:
    terminal = {"FORCE_COLOR": "", "TERM": "xterm", "COLUMNS": str(width or 40)}
    if width is not None:
        terminal |= {"FORCE_COLOR": "1", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, ["traj", "ls", str(path)], env=terminal)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_in_a_pipe_a_row_is_one_line_whatever_the_width(trajectory_file: Path) -> None:
    heading, first, second, totals = printed(trajectory_file, None)
    assert len(heading.split()) >= 6
    assert len(first.split()) == len(second.split())
    assert totals


@pytest.mark.parametrize("width", [80, 44])
def test_episodes_fit_the_terminal_with_whole_numbers_and_names(trajectory_file: Path, width: int) -> None:
    lines = printed(trajectory_file, width)
    assert max(map(cell_len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert {"digits-0-3-1", "-1", "truncated"} <= words
    assert any(EPISODES[1].episode_id.startswith(word) for word in words if len(word) > 8)


@pytest.mark.parametrize("width", [80, 40])
def test_findings_fit_the_terminal_with_every_word_of_their_cures(width: int) -> None:
    findings = [
        ok("first response after 12.3 ms, later ones 1.2 ms", check="reachable"),
        failed(
            "the server's floats are those of image_mean [0.5, 0.5, 0.5]",
            "start `vllm serve`",
            check="image normalisation",
        ),
    ]
    file = io.StringIO()
    print_findings(findings, Console(file=file, width=width, force_terminal=True, no_color=True, color_system=None))
    lines = file.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    words = " ".join(file.getvalue().split())
    for text in ("12.3 ms", "[0.5, 0.5, 0.5]", "image", "normalisation", "failed", "-> start `vllm serve`"):
        assert text in words
