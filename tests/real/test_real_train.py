"""`rollouts train` with real servers as samplers: the weights that they read are the trainer's after every step."""

import json
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import make_checkpoint
from sglang_server import SGLangServer, sglang_venv
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.demo import digits
from rollouts.testing import tiny_qwen3_vl
from transport import RecordReader

STEPS = 4
ALL_PARAMETERS, ADAPTER = 0, 8


def mismatches(directory: Path, model: Path, engine: str, rank: int, *changes: str) -> list[float]:
    """The largest mismatch of each step in which the digits of the demonstration are learnt from a server's samples."""
    source = Path(digits.__file__)
    local = '[engine]\nkind = "local"               # transformers, in the process of the trainer\n'
    local += 'directory = "model"          # random weights\n'
    text = source.with_name("train.toml").read_text("utf-8")
    assert local in text
    (directory / "train.toml").write_text(text.replace(local, f"[engine]\n{engine}\n"), "utf-8")
    (directory / "digits.py").write_text(source.read_text("utf-8"), "utf-8")
    small = [f"train.steps={STEPS}", "train.groups=12", f"evaluation.every={STEPS}", "group_size=4"]
    changes = (*small, f"train.lora_rank={rank}", f'renderer.model="{model}"', *changes)
    options = [part for change in changes for part in ("--set", change)]
    result = CliRunner().invoke(app, ["train", str(directory / "train.toml"), *options])
    assert result.exit_code == 0, result.output
    return figures(directory, "mismatch_max")


def figures(directory: Path, name: str) -> list[float]:
    rows = [json.loads(line)["metrics"] for line in (directory / "out/training.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def test_vllm_reads_whole_checkpoints(vllm_server: Any, restored: Any, tmp_path: Path) -> None:
    model = tiny_qwen3_vl(tmp_path / "model")
    found = mismatches(tmp_path, model, f'kind = "vllm"\nbase_url = "{vllm_server.base_url}"', ALL_PARAMETERS)
    assert len(found) == STEPS
    assert all(0 < mismatch < 1e-4 for mismatch in found)


@pytest.mark.parametrize("vllm_server", ["lora"], indirect=True)
def test_vllm_reads_adapters(vllm_server: Any, tmp_path: Path) -> None:
    engine = f'kind = "vllm"\nbase_url = "{vllm_server.base_url}"'
    found = mismatches(tmp_path, vllm_server.model_dir, engine, ADAPTER)
    assert len(found) == STEPS
    assert all(0 < mismatch < 1e-4 for mismatch in found)
    command = ["eval", str(tmp_path / "train.toml"), "--model", str(tmp_path / "out/last"), "--limit", "4", "-n", "1"]
    command += ["--set", f"renderer.model={vllm_server.model_dir}", "--out", str(tmp_path / "evaluated")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    with RecordReader(tmp_path / "evaluated" / "trajectories.mmr") as reader:
        spans = [
            span
            for (episode,) in map(reader.__getitem__, range(4))
            for node in episode.nodes
            for span in node.weight_spans
        ]
    assert spans
    assert all(span.version.startswith("adapter-") for span in spans)


@pytest.mark.parametrize("vllm_server", ["lora"], indirect=True)
def test_the_gate_passes_what_vllm_samples_with_the_new_adapter_while_the_old_one_is_sampled_too(
    vllm_server: Any, tmp_path: Path
) -> None:
    engine = f'kind = "vllm"\nbase_url = "{vllm_server.base_url}"\n[mode]\nkind = "one_step_off_policy"'
    found = mismatches(tmp_path, vllm_server.model_dir, engine, ADAPTER, "train.max_mismatch=1e-5")
    assert all(mismatch < 1e-4 for mismatch in found)
    assert max(figures(tmp_path, "staleness")) > 0  # what the weights of the step before have sampled is no mismatch


def test_sglang_reads_whole_checkpoints(tmp_path: Path) -> None:
    sglang_venv()
    model = make_checkpoint(tmp_path / "served")
    server = SGLangServer(model, tmp_path / "log")
    try:
        server.until_healthy()
        found = mismatches(tmp_path, model, f'kind = "sglang"\nbase_url = "{server.base_url}"', ALL_PARAMETERS)
    finally:
        server.stop()
    assert len(found) == STEPS
    assert all(0 < mismatch < 1e-4 for mismatch in found)
