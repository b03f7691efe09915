"""`rollouts run` with scripted completions: what it prints, writes, refuses and continues."""

import errno
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from run_config_files import CONFIG, FOURS, changed, groups_of, rows_of, run, summary_of, write_run

from rollouts.engines.http.connection import HttpLimits
from transport import RecordWriter


@pytest.mark.slow
def test_a_run_writes_every_group_once_with_its_figures(tmp_path: Path) -> None:
    result = run(write_run(tmp_path, FOURS))
    assert result.exit_code == 0, result.output
    assert sorted([episode.episode_id for episode in group] for group in groups_of(tmp_path)) == [
        ["four/0.0", "four/1.0"],
        ["seven/0.0", "seven/1.0"],
    ]
    rewards = {row["task_id"]: row["total_rewards"] for row in rows_of(tmp_path)}
    assert rewards == {"four": [1.0, 1.0], "seven": [0.0, 0.0]}
    summary = summary_of(tmp_path)
    assert {name: summary[name] for name in ("complete", "groups", "episodes", "done", "failed", "turns")} == {
        "complete": True,
        "groups": 2,
        "episodes": 4,
        "done": 4,
        "failed": 0,
        "turns": 1 + 1 + 2 + 2,
    }
    assert (summary["total_reward_mean"], summary["total_reward_std"], summary["rewards_not_finite"]) == (0.5, 0.5, 0)
    assert "reward mean" in result.stdout
    assert "0.500" in result.stdout


# --dry-run.

IMAGE_ENVIRONMENT = """\
import numpy as np

class Look:
    tools = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}]
    def __init__(self, task, tries): pass
    def reset(self, seed):
        image = np.zeros((32, 64, 3), np.uint8)
        return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Dark?"}]}]
    def step(self, assistant): raise AssertionError
    def close(self):
        open("closed", "w").close()

class Broken(Look):
    def reset(self, seed): raise OSError("the simulator is not there")
"""

VLLM = 'kind = "vllm"\nbase_url = "http://127.0.0.1:9"\napi_key_env = "KEY_OF_THE_TEST"'


def write_image_run(directory: Path, name: str) -> Path:
    config = changed('kind = "scripted"\ncompletions = ["4", "7"]', VLLM).replace("guess_env:Guess", f"look_env:{name}")
    path = write_run(directory, config)
    (directory / "look_env.py").write_text(IMAGE_ENVIRONMENT)
    return path


def test_a_dry_run_prints_the_first_prompt_and_opens_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setenv("KEY_OF_THE_TEST", "sk-secret")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    result = run(write_image_run(tmp_path, "Look"), "--dry-run")
    assert result.exit_code == 0, result.output
    # 8-pixel patches, 2x2 of them a token: 32x64 pixels are 2 x 4 tokens
    assert "1 message, 1 tool, 1 image of 8 tokens" in result.stdout
    assert "D¦a¦r¦k¦?" in result.stdout
    assert "sk-secret" not in result.output
    assert not caplog.records, "a dry run whose episode ends at its first request is no failure"
    assert (tmp_path / "closed").exists()  # the environment's `close`
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_an_environment_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEST", "sk-secret")
    monkeypatch.chdir(tmp_path)
    result = run(write_image_run(tmp_path, "Broken"), "--dry-run")
    assert result.exit_code == 2
    assert "task four has no first prompt" in result.stderr
    assert "Broken.reset raised OSError: the simulator is not there" in result.stderr


@pytest.mark.parametrize("arguments", [("--dry-run",), ()])
@pytest.mark.parametrize(
    ("made", "more", "text"),
    [
        ("out", (), "out cannot be made: .*/out is no directory; name another directory"),
        ("out/notes.txt", (), "out is not empty; pass --resume to continue the run in it, or name another directory"),
        ("out/notes.txt", ("--resume",), "out is not empty and has no journal to continue from; name the directory"),
    ],
)
def test_an_output_directory_that_cannot_be_used_is_refused_by_a_dry_run_as_by_a_run(
    tmp_path: Path, arguments: tuple[str, ...], made: str, more: tuple[str, ...], text: str
) -> None:
    path = write_run(tmp_path)
    (tmp_path / made).parent.mkdir(exist_ok=True)
    (tmp_path / made).write_text("a file")
    result = run(path, *arguments, *more)
    assert result.exit_code == 2
    assert re.search(f"output.directory: .*/{text}", result.stderr)


@pytest.mark.parametrize(
    "name",
    [
        *("trajectories.mmr", "metrics.jsonl", "runner_metrics.jsonl", "summary.json", "results.json", "tensorboard"),
        *("journal", "journal/journal.mmr"),
    ],
)
def test_a_run_does_not_continue_through_a_symbolic_link(tmp_path: Path, name: str) -> None:
    path, link = write_run(tmp_path), tmp_path / "out" / name
    (tmp_path / "out/journal").mkdir(parents=True)
    other = tmp_path / "other"
    other.write_text("not of the run") if name not in ("journal", "tensorboard") else other.mkdir()
    link.rmdir() if link.is_dir() else None
    link.symlink_to(other)
    result = run(path, "--resume")
    assert result.exit_code == 2
    assert f"a symbolic link, {link}," in "".join(result.stderr.splitlines())
    assert list(other.iterdir()) == [] if other.is_dir() else other.read_text() == "not of the run"


@pytest.mark.parametrize("arguments", [("--dry-run",), ()])
def test_a_file_without_tasks_is_an_error_before_the_run(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    path = write_run(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("\n")
    files = sorted(tmp_path.iterdir())
    result = run(path, *arguments)
    assert result.exit_code == 2
    assert "run.toml: tasks: there is no task" in result.stderr
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == files


# Errors.


def test_a_server_that_does_not_respond_is_an_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEST", "sk-secret")
    monkeypatch.setattr(HttpLimits, "retry_delay", lambda *_: 0.0)
    text = changed('kind = "scripted"\ncompletions = ["4", "7"]', VLLM)
    result = run(write_run(tmp_path, text))
    assert result.exit_code == 2
    assert "run.toml: engine.base_url: " in result.stderr
    assert "no connection (Connection refused). Is the server running, and at this address?" in result.stderr
    assert "sk-secret" not in result.output
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("[1]", "holds [1]; write an object with the data of a task"),
        ('{"name": "four", "number": 4}', "has the id of line 1, 'four'; give each task its own"),
        ("{'a': 1}", "not JSON in UTF-8: .*; write one JSON object a line"),
        ('{"a": 1}', "has no 'name', which the configuration names; add it, or remove tasks.id_key"),
        ('{"name": 1.5}', "name is 1.5; write a text or an integer"),
        ('{"name": "\\ud800"}', "not JSON in UTF-8: .*surrogates not allowed"),
        ('{"name": ""}', "task_id is ''; .*not empty"),
        ('{"name": "caf\udce9"}', "not JSON in UTF-8: .*can't decode byte 0xe9"),
    ],
)
def test_a_wrong_row_is_an_error_before_the_run_and_of_a_dry_run(tmp_path: Path, row: str, reason: str) -> None:
    path = write_run(tmp_path, FOURS)
    with (tmp_path / "tasks.jsonl").open("a", errors="surrogateescape") as tasks:
        tasks.write(f"{row}\n")
    for arguments in ((), ("--dry-run",), ("--limit", "3")):
        result = run(path, *arguments)
        assert result.exit_code == 2
        place = re.escape(f"error: {tmp_path / 'tasks.jsonl'}, line 3: ")
        assert re.match(place + reason.replace("[1]", r"\[1\]"), result.stderr)
        assert not (tmp_path / "out").exists()
    assert run(path, "--limit", "2").exit_code == 0
    assert len(groups_of(tmp_path)) == 2


def test_a_run_whose_every_episode_fails_exits_with_1_and_counts_the_errors(tmp_path: Path) -> None:
    path = write_run(tmp_path, CONFIG.replace("guess_env:Guess", "broken_env:Broken"))
    (tmp_path / "broken_env.py").write_text("class Broken:\n    def __init__(self, task, tries): 1 / 0\n")
    result = run(path)
    assert result.exit_code == 1
    assert "every episode failed" in result.stderr
    ((kind, error),) = summary_of(tmp_path)["errors"].items()
    assert (kind, error["episodes"]) == ("EnvironmentFailedError", 4)
    assert "ZeroDivisionError: division by zero" in error["example"]
    assert error["example"] in result.stdout
    assert len(groups_of(tmp_path)) == 2


@pytest.mark.slow
def test_a_run_whose_first_groups_fail_stops_with_their_error_and_can_be_continued(tmp_path: Path) -> None:
    broken = "concurrency = 2\nstop_after_failed_groups = 1\n" + CONFIG.replace("guess_env:Guess", "broken_env:Broken")
    path = write_run(tmp_path, broken.replace("concurrency = 4\n", ""))
    environment = tmp_path / "broken_env.py"
    environment.write_text("class Broken:\n    def __init__(self, task, tries): 1 / 0\n")
    result = run(path)
    assert result.exit_code == 2
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert "stop_after_failed_groups, which is 1, to 0" in result.stderr
    assert (summary_of(tmp_path)["complete"], len(groups_of(tmp_path))) == (False, 1)
    path.write_text(path.read_text().replace("stop_after_failed_groups = 1", "stop_after_failed_groups = 0"))
    assert run(path, "--resume").exit_code == 1  # every episode failed
    assert (summary_of(tmp_path)["complete"], len(groups_of(tmp_path))) == (True, 2)


@pytest.mark.slow
@pytest.mark.parametrize("full", ["out/journal", "out/trajectories.mmr"])
def test_a_full_disk_leaves_a_summary_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    path = write_run(tmp_path, FOURS)
    rows = [{"name": name, "number": number, "text": "x" * 10_000} for name, number in (("four", 4), ("seven", 7))]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write = RecordWriter._write_records

    def fill(writer: RecordWriter, parts: list[bytes], count: int) -> None:
        if full in writer.path and b"seven" in b"".join(parts):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, parts, count)

    monkeypatch.setattr(RecordWriter, "_write_records", fill)
    result = run(path)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert f"{full}: " in result.stderr
    assert "No space left on device" in result.stderr
    assert summary_of(tmp_path)["complete"] is False
    monkeypatch.undo()
    result = run(path, "--resume")
    assert result.exit_code == 0, result.output
    assert summary_of(tmp_path)["groups"] == 2


@pytest.mark.slow
def test_ctrl_c_while_the_report_is_written_names_the_command_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rollouts.report.write_report", interrupt)
    result = run(write_run(tmp_path))
    assert result.exit_code == 130
    assert f"`rollouts report {tmp_path / 'out'}` writes it" in result.stderr
    assert summary_of(tmp_path)["complete"] is True


def test_texts_of_an_environment_cannot_control_the_terminal(tmp_path: Path) -> None:
    config = CONFIG.replace("guess_env:Guess", "loud_env:Loud")
    path = write_run(tmp_path, config.replace("seed = 3", 'seed = 3\nskip_group = "loud_env:skip"'))
    (tmp_path / "loud_env.py").write_text(
        "class Loud:\n"
        "    def __init__(self, task, tries): pass\n"
        "    def reset(self, seed): raise ValueError('[/red]\\x1b[2J\\nline\\u202e')\n"
        "    def step(self, assistant): raise AssertionError\n"
        "def skip(group): return 'a/b_c\\x1b[31m\\nevil' if group.task.task_id == 'four' else False\n"
    )
    stdout = run(path).stdout
    assert "\x1b" not in stdout
    assert "\u202e" not in stdout
    assert "groups skipped: a/b_c␛[31m⏎evil" in stdout
    assert "ValueError: [/red]␛[2J⏎line<U+202E>" in stdout


# --limit and --resume.


@pytest.mark.slow
def test_a_limit_runs_the_first_tasks_and_a_larger_one_continues_after_them(tmp_path: Path) -> None:
    path = write_run(tmp_path, FOURS)
    assert run(path, "--limit", 1).exit_code == 0
    assert [row["task_id"] for row in rows_of(tmp_path)] == ["four"]
    first = (tmp_path / "out/metrics.jsonl").read_text()
    assert run(path, "--limit", 2, "--resume").exit_code == 0
    assert [row["task_id"] for row in rows_of(tmp_path)] == ["four", "seven"]
    assert (tmp_path / "out/metrics.jsonl").read_text().startswith(first)
    assert summary_of(tmp_path)["episodes"] == 4


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_values(tmp_path: Path) -> None:
    run(write_run(tmp_path, FOURS), "--limit", 1)
    summary = summary_of(tmp_path)
    for old, new, named in (
        ("temperature = 0.5", "temperature = 0.6", "temperature"),
        ("seed = 3", "seed = 4", "seed"),
        ("tries = 2", "tries = 3", "tries"),
        ("group_size = 2", "group_size = 3", "group_size"),
    ):
        result = run(write_run(tmp_path, FOURS.replace(old, new), model=False), "--resume")
        assert result.exit_code == 2
        assert named in result.stderr
    assert summary_of(tmp_path) == summary
    other_speed = FOURS.replace("concurrency = 4", "concurrency = 1")
    assert run(write_run(tmp_path, other_speed, model=False), "--resume").exit_code == 0


@pytest.mark.slow
def test_a_changed_file_of_tasks_continues_a_run_only_where_its_rows_have_ids(tmp_path: Path) -> None:
    path = write_run(tmp_path, FOURS.replace('id_key = "name"\n', ""))
    assert run(path).exit_code == 0
    with_a_row = '{"name": "five", "number": 5}\n' + (tmp_path / "tasks.jsonl").read_text()
    (tmp_path / "tasks.jsonl").write_text(with_a_row)
    result = run(path, "--resume")
    assert result.exit_code == 2
    assert "tasks.content_of_the_file" in result.stderr
    path = write_run(tmp_path / "ids", FOURS)
    assert run(path).exit_code == 0
    (tmp_path / "ids/tasks.jsonl").write_text(with_a_row)
    assert run(path, "--resume").exit_code == 0
    assert [row["task_id"] for row in rows_of(tmp_path / "ids")][2:] == ["five"]
