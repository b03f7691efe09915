"""The example of a run, with a real model, and the page on runs."""

import json
import re
import shutil
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.run_config import sections
from rollouts.run_config.config_file import read_config
from transport import read_records

ROOT = Path(__file__).parent.parent.parent.parent
PAGE = (ROOT / "docs/run.md").read_text("utf-8")
OF_TRAINING = (ROOT / "docs/train.md").read_text("utf-8")


@pytest.mark.slow
def test_the_example_runs_with_a_real_model_and_equal_seeds_sample_equal_tokens(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = []
    for name in ("first", "second"):
        directory = tmp_path / name
        shutil.copytree(ROOT / "examples/run_config", directory, ignore=shutil.ignore_patterns("model", "out"))
        (directory / "model").symlink_to(tiny_model_dir)
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(app, ["run", f"{name}/colours.toml"])
        assert result.exit_code == 0, result.output
        groups = {group[0].group_id: group for group in read_records(directory / "out/trajectories.mmr")}
        assert {task: len(group) for task, group in groups.items()} == {"red": 4, "green": 4, "blue": 4}
        tokens.append({task: [e.nodes[-1].token_ids.tolist() for e in group] for task, group in groups.items()})
    assert tokens[0] == tokens[1]
    assert len({str(ids) for ids in tokens[0]["red"]}) > 1  # the episodes of a group differ
    rows = [json.loads(line) for line in (tmp_path / "first/out/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["images"] == row["turns"]
        assert max(row["reward_parts"]["brevity"]) == 1.0


def test_the_configurations_of_the_page_are_valid(tmp_path: Path) -> None:
    whole, *engines, teacher = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "run.toml").write_text(whole)
    assert read_config(tmp_path / "run.toml").config.group_size == 8
    of_the_whole = re.search(r"^\[engine\]\n(.+\n)+", whole, re.MULTILINE)
    assert of_the_whole is not None
    for engine, kind in zip(engines, ["fleet", "fleet"], strict=True):
        (tmp_path / "run.toml").write_text(whole.replace(of_the_whole[0], engine))
        assert read_config(tmp_path / "run.toml").config.engine.kind == kind
    (tmp_path / "run.toml").write_text(whole + teacher)
    scored_by = read_config(tmp_path / "run.toml").config.teacher
    assert scored_by is not None
    assert (scored_by.engine.kind, scored_by.top_k) == ("vllm", 8)


@pytest.mark.parametrize(
    "model",
    [
        model
        for model in vars(sections).values()
        if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ == sections.__name__
    ],
    ids=lambda model: model.__name__,
)
def test_every_key_is_on_the_page(model: type[BaseModel]) -> None:
    described = {"LimitsSection", "RetrySection", "MediaSection"}  # by the class whose fields they are
    if model.__name__ not in described:
        for key in model.model_fields:
            assert re.search(rf"\b{key}\b", PAGE + OF_TRAINING), key
