"""A training run that was killed, or whose disk was full, ends with the bits of one that was not."""

import itertools
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vowels_training import CONFIG, HELD_OUT, outcome, project, started, train

from rollouts.errors import RolloutsError
from rollouts.run_config.group_files import GroupFiles
from rollouts.runner import Runner
from rollouts.train.checkpoints import Checkpoints
from rollouts.training.trainer import Trainer

SUPERVISED = """
[supervised]
tasks = { kind = "jsonl", path = "conversations.jsonl" }
steps = 4
batch = 1
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    result = train(written(directory, tiny_model_dir))
    assert result.exit_code == 0, result.output
    return outcome(directory)


def written(directory: Path, model: Path) -> Path:
    lines = [
        f'{{"messages": [{{"role": "user", "content": "Sing."}}, {{"role": "assistant", "content": "{text}"}}]}}\n'
        for text in ("aeiou", "eee", "ia")
    ]
    path = project(directory, model, CONFIG + HELD_OUT + SUPERVISED)
    (directory / "conversations.jsonl").write_text("".join(lines))
    return path


@pytest.mark.parametrize(
    ("owner", "method", "calls"),
    [
        (Trainer, "optim_step", 3),  # in the warm start
        (Checkpoints, "save", 1),
        (GroupFiles, "write_row", 1),  # of the evaluation before the first step
        (GroupFiles, "write_row", 15),  # of the second step: 5 groups of each evaluation, 3 of a step
        (Trainer, "optim_step", 6),
        (Runner, "update_weights", 2),
        (Trainer, "save", 3),
    ],
)
def test_a_run_that_fails_anywhere_goes_on_from_its_checkpoint_to_the_same_end(
    tmp_path: Path,
    tiny_model_dir: Path,
    uninterrupted: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    calls: int,
) -> None:
    original, left = getattr(owner, method), [calls]

    def failing(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RolloutsError("planted")
        return original(*arguments, **options)

    path = written(tmp_path, tiny_model_dir)
    with monkeypatch.context() as planted:
        planted.setattr(owner, method, failing)
        result = train(path)
    assert (result.exit_code, "planted" in result.output) == (2, True), result.output
    assert result.output.startswith("warm start: 4 supervised steps\n")  # also where it ended within them
    steps = [int(each.parent.name.removeprefix("step-")) for each in tmp_path.glob("out/checkpoints/*/state.json")]
    again = train(path, "--resume")
    assert again.exit_code == 0, again.output
    assert outcome(tmp_path) == uninterrupted
    first = again.output.partition("\n")[0]
    assert first == (f"continuing after step {max(steps)} of 3" if steps else "warm start: 4 supervised steps")
    assert ("warm start" in again.output) == (not steps)


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Checkpoints, "save"), (Trainer, "save_for_sampler")],  # of the first step, which is better than the start
)
def test_best_has_the_weights_of_the_best_checkpoint_wherever_the_process_ends(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    original, calls = getattr(owner, method), itertools.count(1)

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise RolloutsError("planted")
        return original(*arguments, **options)

    path = project(tmp_path, tiny_model_dir, CONFIG + HELD_OUT)
    environment = (tmp_path / "vowels_env.py").read_text()
    # Each evaluation is better than the one before.
    rising = environment.replace("reward=", "reward=next(CALLS) + 1e-3 * ")
    (tmp_path / "vowels_env.py").write_text("import itertools\nCALLS = itertools.count()\n" + rising)
    best = tmp_path / "out" / "best" / "model.safetensors"
    with monkeypatch.context() as planted:
        planted.setattr(owner, method, failing)
        assert "planted" in train(path).output
    start, held = (load_file(each) for each in (tiny_model_dir / "model.safetensors", best))
    assert all(torch.equal(start[name], held[name]) for name in held)
    assert train(path, "--resume").exit_code == 0
    assert best.read_bytes() == (tmp_path / "out" / "last" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("key", "value"), [("seed", "4"), ("group_size", "5"), ("evaluation.samples", "3"), ("train.learning_rate", "0.5")]
)
def test_a_run_with_other_values_is_another_run(tmp_path: Path, tiny_model_dir: Path, key: str, value: str) -> None:
    path = project(tmp_path, tiny_model_dir, CONFIG + HELD_OUT, steps="1")
    assert train(path).exit_code == 0
    refused = train(path, "--resume", "--set", f"{key}={value}")
    assert refused.exit_code == 2
    assert f"{key}: it was " in refused.output
    longer = train(path, "--resume", "--set", "train.steps=2", "--set", "evaluation.every=2")
    assert longer.exit_code == 0, longer.output


@pytest.mark.parametrize(("table", "name"), [("tasks", "tasks.jsonl"), ("evaluation", "held_out.jsonl")])
def test_a_run_whose_files_of_tasks_have_changed_is_another_run(
    tmp_path: Path, tiny_model_dir: Path, table: str, name: str
) -> None:
    config = CONFIG.replace('"tasks.jsonl"', '"tasks.jsonl", id_key = "name"')
    path = project(tmp_path, tiny_model_dir, config + HELD_OUT.replace("tasks.jsonl", "held_out.jsonl"), steps="1")
    rows = [{"name": letter, "rgb": [10, 20, 30]} for letter in "abcde"]
    for each in ("tasks.jsonl", "held_out.jsonl"):
        (tmp_path / each).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(path).exit_code == 0
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    refused = train(path, "--resume", "--set", "train.steps=2")
    assert refused.exit_code == 2
    assert f"{table}.content_of_the_file: it was " in refused.output


@pytest.mark.parametrize("name", ["vowels_env", "held", "beside"])
def test_a_run_whose_modules_have_changed_is_another_run(tmp_path: Path, tiny_model_dir: Path, name: str) -> None:
    held_out = HELD_OUT.replace('kind = "jsonl", path = "tasks.jsonl"', 'kind = "import", source = "held:TASKS"')
    path = project(tmp_path, tiny_model_dir, CONFIG + held_out, steps="1")
    (tmp_path / "held.py").write_text(
        "from beside import RGB\nfrom rollouts import Task\nTASKS = [Task('a', {'rgb': RGB})]\n"
    )
    (tmp_path / "beside.py").write_text("RGB = [1, 2, 3]\n")
    assert train(path).exit_code == 0
    module = tmp_path / f"{name}.py"
    before = module.read_text()
    module.write_text(f"{before}\n# mended\n")
    refused = train(path, "--resume", "--set", "train.steps=2")
    assert refused.exit_code == 2
    assert f"modules.{name}: it was " in refused.output.replace('"', "")
    module.write_text(before)
    assert train(path, "--resume", "--set", "train.steps=2").exit_code == 0


def test_a_run_whose_chat_template_has_changed_is_another_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    renderer = '{ model = "MODEL", chat_template = "template.jinja" }'
    path = project(tmp_path, tiny_model_dir, steps="1", renderer=renderer)
    template = tmp_path / "template.jinja"
    template.write_text((tiny_model_dir / "chat_template.jinja").read_text())
    assert train(path).exit_code == 0
    template.write_text(f"{template.read_text()}{{# mended #}}")
    refused = train(path, "--resume", "--set", "train.steps=2")
    assert refused.exit_code == 2
    assert "template: it was " in refused.output


@pytest.mark.parametrize(("rank", "is_refused"), [("2", True), ("0", False)])  # 0: the checkpoint has all weights
def test_an_adapter_does_not_continue_on_other_weights_of_the_base_model(
    tmp_path: Path, tiny_model_dir: Path, rank: str, is_refused: bool
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    path = project(tmp_path, model, steps="1", lora_rank=rank)
    assert train(path).exit_code == 0
    weights = load_file(model / "model.safetensors")
    save_file({name: 1.01 * value for name, value in weights.items()}, model / "model.safetensors", {"format": "pt"})
    again = train(path, "--resume", "--set", "train.steps=2")
    assert (again.exit_code, "base_weights: it was " in again.output) == ((2, True) if is_refused else (0, False))


def test_a_second_process_in_the_same_directory_ends_at_once(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = project(tmp_path, tiny_model_dir, steps="100000")
    first = started(path)
    assert first.stdout is not None
    assert "step 1/" in first.stdout.readline()
    refused = train(path, "--resume")
    first.kill()
    first.communicate()
    assert refused.exit_code == 2
    assert f"{tmp_path / 'out'}: another process trains in it; end it" in refused.output


@pytest.mark.parametrize("name", ["trajectories.mmr", "metrics.jsonl", "training.jsonl", "mismatch.mmr"])
def test_a_file_that_is_shorter_than_at_the_checkpoint_is_refused(
    tmp_path: Path, tiny_model_dir: Path, name: str
) -> None:
    path, file = project(tmp_path, tiny_model_dir, steps="1"), tmp_path / "out" / name
    assert train(path).exit_code == 0
    size = file.stat().st_size
    os.truncate(file, size - 1)
    refused = train(path, "--resume", "--set", "train.steps=2")
    assert refused.exit_code == 2
    assert f"{file}: it has {size - 1:,} bytes, and {size:,} when" in refused.output.replace("\n", " ")
    assert file.stat().st_size == size - 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", "{"),
        ("state.json", "[]"),
        ("state.json", '{"step": "one", "configuration": {}}'),
        ("checkpoint.safetensors", "x"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_named_and_the_run_goes_on_from_the_one_before(
    tmp_path: Path, tiny_model_dir: Path, name: str, content: str
) -> None:
    path, newest = project(tmp_path, tiny_model_dir, steps="1"), tmp_path / "out" / "checkpoints" / "step-1"
    assert train(path).exit_code == 0
    (newest / name).write_text(content)
    refused = train(path, "--resume")
    assert refused.exit_code == 2
    assert f"{newest}: the checkpoint cannot be read" in refused.output
    assert "delete it, and --resume continues from the one before" in refused.output
    shutil.rmtree(newest)
    again = train(path, "--resume")
    assert again.exit_code == 0, again.output


def test_a_run_without_any_checkpoint_keeps_the_groups_that_it_has(tmp_path: Path, tiny_model_dir: Path) -> None:
    path, out = project(tmp_path, tiny_model_dir, f"{CONFIG}keep = 1\n", steps="1"), tmp_path / "out"
    assert train(path).exit_code == 0
    files = {each: each.read_bytes() for each in out.iterdir() if each.is_file()}
    shutil.rmtree(out / "checkpoints" / "step-1")
    refused = train(path, "--resume")
    assert refused.exit_code == 2
    assert "checkpoints: there is no checkpoint, and the groups of the run would be removed" in refused.output
    assert {each: each.read_bytes() for each in files} == files


def test_a_checkpoint_whose_removal_was_interrupted_is_gone_when_the_run_goes_on(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(path: Path) -> None:
        (path / "state.json").unlink()
        raise RolloutsError("planted")

    path = project(tmp_path, tiny_model_dir, f"{CONFIG}keep = 1\n", steps="1")
    with monkeypatch.context() as planted:
        planted.setattr(shutil, "rmtree", stopped)
        assert "planted" in train(path).output
    assert train(path, "--resume").exit_code == 0
    assert sorted(each.name for each in (tmp_path / "out" / "checkpoints").iterdir()) == ["lock", "step-1"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(
    tmp_path: Path, tiny_model_dir: Path, uninterrupted: dict[str, Any], seed: int
) -> None:
    path, drawn = written(tmp_path, tiny_model_dir), random.Random(seed)
    process = started(path)
    assert process.stdout is not None
    for _ in range(drawn.randint(1, 4)):  # lines of output
        process.stdout.readline()
    time.sleep(drawn.uniform(0, 0.4))
    process.kill()
    process.communicate()
    again = train(path, "--resume")
    assert again.exit_code == 0, again.output
    assert outcome(tmp_path) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("most", [20_000, 300_000, 1_500_000])
def test_a_disk_that_is_full_stops_the_run_and_it_goes_on_when_there_is_space(
    tmp_path: Path, tiny_model_dir: Path, uninterrupted: dict[str, Any], most: int
) -> None:
    limit = (
        "import resource, signal, sys; sys.dont_write_bytecode = True; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))"
    )
    path = written(tmp_path, tiny_model_dir)
    process = started(path, before=limit)
    output, _ = process.communicate()
    assert process.returncode == 2, output
    assert "File too large" in output
    again = train(path, "--resume")
    assert again.exit_code == 0, again.output
    assert outcome(tmp_path) == uninterrupted
