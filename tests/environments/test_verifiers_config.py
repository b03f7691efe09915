"""`rollouts run` with environments of verifiers. Needs verifiers 0.4: python tests/dropin/verifiers_environment.py"""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollouts.cli.main import app
from transport import read_records

pytest.importorskip("verifiers.v1")

CONFIG = """\
group_size = 2
concurrency = 4

[tasks]
kind = "verifiers"

[environment]
kind = "verifiers"
id = "colours-v1"
arguments = { agent.runtime.type = "subprocess" }

[engine]
kind = "scripted"
completions = ["red"]

[renderer]
model = "model"

[sampling]
max_tokens = 16

[output]
directory = "out"
report = false
"""


@pytest.fixture
def directory(tmp_path, tiny_model_dir):
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    return tmp_path


def rollouts(directory: Path, command: str, *options: str, config: str = CONFIG):
    (directory / "run.toml").write_text(config)
    return CliRunner().invoke(app, [command, str(directory / "run.toml"), *options])


def changed(old: str, new: str) -> str:
    assert CONFIG.count(old) == 1
    return CONFIG.replace(old, new)


def rows_of(directory: Path):
    return [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_has_a_group_for_each_task_of_the_taskset_and_goes_on_where_it_stopped(directory):
    result = rollouts(directory, "run", "--limit", "1")
    assert result.exit_code == 0, result.output
    assert [row["task_id"] for row in rows_of(directory)] == ["0"]
    result = rollouts(directory, "run", "--resume")
    assert result.exit_code == 0, result.output
    rows = {row["task_id"]: row for row in rows_of(directory)}
    assert sorted(rows) == ["0", "1", "2", "3"]
    for index in range(4):
        row = rows[str(index)]
        assert row["total_rewards"] == [pytest.approx(2 / 3)] * 2
        assert row["reward_parts"] == {"named": [pytest.approx(1 / 3)] * 2}
        assert row["task_data"] == {"index": index}
    groups = read_records(directory / "out" / "trajectories.mmr")
    assert sorted(episode.episode_id for group in groups for episode in group) == [
        f"{task}/{index}.0" for task in range(4) for index in range(2)
    ]


def test_arguments_are_values_of_the_table_of_verifiers(directory):
    arguments = '{ agent = { runtime.type = "subprocess", max_turns = 1 }, taskset.options.tool = true }'
    config = changed('{ agent.runtime.type = "subprocess" }', arguments)
    result = rollouts(directory, "run", config=config)
    assert result.exit_code == 0, result.output
    assert [(row["turns"], row["truncated"]) for row in rows_of(directory)] == [(2, 2)] * 4


def test_a_dry_run_prints_the_first_prompt_with_its_image(directory):
    result = rollouts(directory, "run", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "first prompt: task 0, environment seed 0" in result.output
    assert "2 messages, 0 tools, 1 image of" in result.output
    assert not (directory / "out").exists()


def with_arguments(text: str) -> str:
    return changed('type = "subprocess" }', f'type = "subprocess", {text} }}')


FILE = 'kind = "jsonl"\npath = "tasks.jsonl"\n\n[environment]'
IMPORTED = '[environment]\nkind = "import"\nfactory = "a:b"\n\n[engine]'


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (changed('"colours-v1"', '"no-such"'), "environment.id: verifiers cannot load 'no-such': "),
        (changed('"colours-v1"', '"json"'), "environment.id: verifiers cannot load 'json': "),
        (with_arguments("agent.turns = 1"), "environment.arguments: verifiers refuses agent.turns: "),
        (with_arguments('taskset.id = "a"'), "environment.arguments.taskset: write a table"),
        (changed('kind = "verifiers"\n\n[environment]', FILE), "environment: tasks and environment are both of kind"),
        (
            CONFIG.split("[environment]")[0] + IMPORTED + CONFIG.split("[engine]")[1],
            "environment: tasks and environment are both of kind",
        ),
    ],
)
def test_what_cannot_work_is_named_with_its_key(directory, config, named):
    result = rollouts(directory, "run", config=config)
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())


def test_actors_of_ray_are_refused(directory):
    result = rollouts(directory, "run", "--ray")
    assert result.exit_code == 2
    named = "environment.kind: environments of verifiers run in the process of the run; leave out --ray"
    assert named in " ".join(result.output.split())


def test_the_example_trains_on_a_taskset_and_is_evaluated_on_tasks_that_it_does_not_reach(directory, monkeypatch):
    for name in ("hues.toml", "hues_v1.py", "one_call_v1.py"):
        path = Path(__file__).parents[2] / "examples" / "train" / name
        assert len(path.read_text("utf-8").splitlines()) <= 40
        shutil.copy(path, directory)
    (directory / "model").rename(directory / "hues-model")
    monkeypatch.setattr(sys, "path", [*sys.path])
    changes = ["train.steps=2", "train.groups=4", "supervised.steps=2", "output.report=false"]
    arguments = [part for change in changes for part in ("--set", change)]
    result = CliRunner().invoke(app, ["train", str(directory / "hues.toml"), *arguments])
    assert result.exit_code == 0, result.output
    output = directory / "hues-out"
    rows = [json.loads(line)["metrics"] for line in (output / "training.jsonl").read_text().splitlines()]
    assert [row["mismatch_max"] < 1e-5 for row in rows if "mismatch_max" in row] == [True, True]
    trained = {json.loads(line)["task_data"]["index"] for line in (output / "metrics.jsonl").read_text().splitlines()}
    held_out = json.loads((output / "evaluations" / "2" / "results.json").read_text())
    assert trained == set(range(8))
    assert held_out["episodes"] == 300
