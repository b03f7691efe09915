"""A training run that was killed, or whose disk was full, ends with the bits of one that was not."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
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
    again = train(path, "--resume")
    assert again.exit_code == 0, again.output
    assert outcome(tmp_path) == uninterrupted


def test_another_value_of_the_file_is_refused_where_the_run_goes_on(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = project(tmp_path, tiny_model_dir, steps="1")
    assert train(path).exit_code == 0
    refused = train(path, "--resume", "--set", "train.learning_rate=0.5")
    assert refused.exit_code == 2
    assert "train.learning_rate: it has changed since the run began" in refused.output
    longer = train(path, "--resume", "--set", "train.steps=2")
    assert longer.exit_code == 0, longer.output


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
