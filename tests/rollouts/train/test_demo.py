"""`rollouts demo`: a project of two files that reads digits, and trains."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from vowels_training import train

from rollouts import Task
from rollouts.cli.main import app
from rollouts.demo import digits
from transport.records.file_lock import locked

PROJECT = Path(digits.__file__).parent


def say(text: str) -> Any:
    return {"role": "assistant", "content": text}


def test_a_wrong_answer_gets_the_same_digit_with_more_contrast_and_one_more_try() -> None:
    environment = digits.ReadDigit(digits.tasks()[5])
    first = environment.reset(0)[0]["content"][0]["image"]
    wrong = environment.step(say("nonsense"))
    second = wrong.messages[0]["content"][0]["image"]
    assert (wrong.reward, wrong.done, np.array_equal(first, second)) == (0.0, False, False)
    assert np.array_equal(second, digits.digits(False, sharp=True)[0][5])
    right = environment.step(say(str(digits.digits(False)[1][5])))
    assert (right.reward, right.done) == (0.5, True)


def test_held_out_digits_are_in_no_task_of_training_and_blank_ones_show_nothing() -> None:
    trained, held_out = ({image.tobytes() for image in digits.digits(part)[0]} for part in (False, True))
    assert (len(digits.tasks()), len(digits.tasks(held_out=True))) == (1437, 360)
    assert len(trained & held_out) <= 1  # two of the scans are equal
    shown = digits.ReadDigit(Task("one", (5, False)), blank=True).reset(0)[0]["content"][0]["image"]
    assert set(shown.ravel()) == {255}


def test_the_files_of_the_project_are_short() -> None:
    assert all(len((PROJECT / name).read_text("utf-8").splitlines()) <= 60 for name in ("digits.py", "train.toml"))


def test_a_demonstration_that_trains_is_not_replaced(tmp_path: Path) -> None:
    checkpoints = tmp_path / "out" / "checkpoints"
    checkpoints.mkdir(parents=True)
    with locked(checkpoints / "lock", make=True):
        result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "another process trains in it" in result.output
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "out", checkpoints, checkpoints / "lock"]


@pytest.mark.slow
def test_an_interrupted_demo_goes_on_with_train_and_a_second_one_says_that_it_replaces_the_first(
    tmp_path: Path,
) -> None:
    program = "from rollouts.cli.main import main; main()"
    command = [sys.executable, "-u", "-c", program, "demo", "--out", str(tmp_path), "--seed", "7"]
    for again in (False, True):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        printed = ""
        while "step 1/" not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        process.send_signal(signal.SIGINT)
        printed += process.communicate()[0]
        assert process.returncode == 130, printed
        assert ("is an earlier run, which is replaced" in printed) == again
        assert f"to continue: rollouts train {tmp_path}/train.toml --resume" in printed
        assert (tmp_path / "out" / "report.html").exists()
        assert "seed = 7 " in (tmp_path / "train.toml").read_text()
    result = train(tmp_path / "train.toml", "--resume", "--set", "train.steps=2")
    assert result.exit_code == 0, result.output
