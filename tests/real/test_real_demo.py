"""The digits demonstration with a real server as sampler: weights are saved, reloaded, and equal to the trainer's."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.demo import digits
from rollouts.testing import tiny_qwen3_vl


def test_the_mismatch_is_zero_after_every_reload(vllm_server: Any, restored: Any, tmp_path: Path) -> None:
    source = Path(digits.__file__)
    local = '[engine]\nkind = "local"               # transformers, in the process of the trainer\n'
    local += 'directory = "model"          # random weights\n'
    text = source.with_name("train.toml").read_text("utf-8")
    assert local in text
    served = f'[engine]\nkind = "vllm"\nbase_url = "{vllm_server.base_url}"\n'
    (tmp_path / "train.toml").write_text(text.replace(local, served), "utf-8")
    (tmp_path / "digits.py").write_text(source.read_text("utf-8"), "utf-8")
    tiny_qwen3_vl(tmp_path / "model")
    changes = ["train.steps=4", "train.groups=12", "evaluation.every=4", "group_size=4"]
    options = [part for change in changes for part in ("--set", change)]
    result = CliRunner().invoke(app, ["train", str(tmp_path / "train.toml"), *options])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line)["metrics"] for line in (tmp_path / "out/training.jsonl").read_text().splitlines()]
    largest = [row["mismatch_max"] for row in rows if "mismatch_max" in row]
    assert len(largest) == 4
    assert all(0 < mismatch < 1e-4 for mismatch in largest)
