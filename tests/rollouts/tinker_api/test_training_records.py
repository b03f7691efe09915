"""Figures of trained models: a line for each step, lines of evaluations, sinks, reports, and the mismatch."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
from trajectory_files import short
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.tinker.mismatch import mismatch
from rollouts.tinker.training_records import TrainingRecords
from rollouts.training.trainer import Datum, LossResult
from transport import RecordWriter


def floats(*values):
    return np.array(values, np.float32)


def datum(count, **inputs):
    ids = np.arange(count)
    return Datum(ids, ids, {name: floats(*values) for name, values in inputs.items()})


def lines(directory: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (directory / "training.jsonl").read_text().splitlines()]
    return [{"step": row["step"], **row["metrics"]} for row in rows]


class Sink:
    def __init__(self):
        self.written, self.closed = [], False

    def write(self, section, step, values):
        self.written.append((section, step, dict(values)))

    def close(self):
        self.closed = True


STEP = {"learning_rate": 1.0, "grad_norm": 1.0, "seconds": 0.0}


def trained(records, logprob, model_id="m", **options):
    """A call with one row of one token."""
    result = LossResult([floats(logprob)], {"loss:sum": -float(logprob)})
    records.trained(model_id, [datum(1)], "cross_entropy", result, 1.0, **options)


SUPERVISED = [datum(3, weights=(0, 1, 1)), datum(2, weights=(0, 0.5))]
SUPERVISED_RESULT = LossResult([floats(-9, -1, -2), floats(-np.inf, -4)], {"loss:sum": 5.0})


def test_the_line_of_a_step_sums_up_the_calls_since_the_step_before(tmp_path):
    records = TrainingRecords(tmp_path)
    records.trained("m", SUPERVISED, "cross_entropy", SUPERVISED_RESULT, 2.0)
    records.trained("m", [datum(2)], "cross_entropy", LossResult([floats(-1, -2)], {"loss:sum": 3.0}), 1.0)
    records.stepped("m", 1, learning_rate=0.25, grad_norm=0.5, seconds=0.5)
    trained(records, -7)
    records.stepped("m", 2, learning_rate=0.125, grad_norm=0.25, seconds=1.0)
    records.close()
    first, second = lines(tmp_path / "m")
    assert first == {
        "step": 1,
        "loss/cross_entropy": 8.0,
        "nll": pytest.approx((1 + 2 + 0.5 * 4 + 1 + 2) / 4.5),
        "rows": 3,
        "tokens": 7,
        "trained_tokens": 5,
        "seconds": 3.5,
        "grad_norm": 0.5,
        "learning_rate": 0.25,
    }
    assert (second["nll"], second["rows"], second["seconds"]) == (7.0, 1, 2.0)


def test_means_of_calls_count_by_their_tokens_and_losses_have_a_sum_each(tmp_path):
    records = TrainingRecords(tmp_path)

    def call(advantages, loss, total, ratio, largest):
        count = len(advantages)
        data = [datum(count, logprobs=[-1] * count, advantages=advantages)]
        metrics = {"loss:sum": total, "ratio:mean": ratio, "mismatch:max": largest}
        records.trained("m", data, loss, LossResult([floats(*[-1] * count)], metrics), 1.0)

    call((0, 1, -1, 1), "ppo", 1.0, 2.0, 0.25)
    call((0, 0, 1), "ppo", 2.0, 6.0, 0.125)
    call((0, 0), "ppo", 0.0, 100.0, 0.0)
    call((1, 1), "gspo", 8.0, 0.0, 0.0)
    records.stepped("m", 1, **STEP)
    records.close()
    (line,) = lines(tmp_path / "m")
    assert (line["loss/ppo"], line["loss/gspo"]) == (3.0, 8.0)
    assert line["ratio_mean"] == pytest.approx((3 * 2 + 1 * 6 + 2 * 0) / 6)
    assert line["mismatch_max"] == 0.25
    assert line["trained_tokens"] == 6
    assert "nll" not in line


def test_gradients_that_were_forgotten_are_in_no_line(tmp_path):
    records = TrainingRecords(tmp_path)
    records.forgotten("m")
    records.trained("m", SUPERVISED, "cross_entropy", SUPERVISED_RESULT, 2.0)
    records.forgotten("m")
    trained(records, -3)
    records.stepped("m", 1, **STEP)
    records.close()
    assert [(line["rows"], line["nll"]) for line in lines(tmp_path / "m")] == [(1, 3.0)]


def test_a_model_that_is_continued_by_another_process_keeps_its_lines_and_its_step(tmp_path):
    for step in (4, 5):
        records = TrainingRecords(tmp_path)
        trained(records, -3, forward_only=True)
        trained(records, -3)
        records.stepped("m", step, **STEP)
        records.close()
    assert [line["step"] for line in lines(tmp_path / "m")] == [0, 4, 4, 5]


def test_a_sink_or_a_disk_that_fails_does_not_end_training(tmp_path, caplog):
    class Failing(Sink):
        def write(self, section, step, values):
            raise OSError("No space left on device")

    def sinks(model_id):
        if model_id == "unopened":
            raise RuntimeError("no such project")
        return [Failing()]

    records = TrainingRecords(tmp_path, sinks=sinks)
    with caplog.at_level(logging.ERROR):
        for model_id in ("m", "unopened"):
            for step in (1, 2):
                records.trained(model_id, SUPERVISED, "cross_entropy", SUPERVISED_RESULT, 2.0)
                records.stepped(model_id, step, **STEP)
        records.close()
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:2] == ["step 1 of model m was not written", "step 2 of model m was not written"]
    assert len(messages) == 3
    assert "no training log is written" in messages[2]
    assert [line["step"] for line in lines(tmp_path / "m")] == [1, 2]


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_report_shows_the_curves_of_a_model_and_of_all_models_of_a_directory(tmp_path):
    records = TrainingRecords(tmp_path)
    for model_id in ("a", "b"):
        for step in (1, 2):
            trained(records, -3 / step, model_id, forward_only=True)
            trained(records, -3 / step, model_id)
            records.stepped(model_id, step, **STEP)
    records.close()
    (tmp_path / "empty").mkdir()
    assert report(tmp_path / "a").exit_code == 0
    page = (tmp_path / "a" / "report.html").read_text("utf-8")
    for title in ("nll", "forward nll", "loss/cross entropy", "grad norm"):
        assert f"values: {title}" in page, title
    result = report(tmp_path)
    assert result.exit_code == 0, result.output
    assert sorted(path.parent.name for path in tmp_path.rglob("report.html")) == ["a", "b"]
    assert result.output.count("2 training steps in") == 2
    refused = report(tmp_path, "--out", tmp_path / "x.html")
    assert refused.exit_code != 0
    assert "2 models" in refused.output
    assert not (tmp_path / "x.html").exists()
    with RecordWriter(tmp_path / "trajectories.mmr") as writer:
        writer.append(short("recorded"))
    result = report(tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.count("report.html") == 3
    assert "1 episode in" in result.output
    assert report(tmp_path, "--out", tmp_path / "x.html").exit_code == 0
    assert (tmp_path / "x.html").exists()


def test_the_report_of_a_server_with_keys_is_that_of_each_user(tmp_path):
    for user in ("user-1", "user-2"):
        records = TrainingRecords(tmp_path / user)
        for model_id in ("a", "b"):
            trained(records, -1, model_id)
            records.stepped(model_id, 1, **STEP)
        records.close()
    with RecordWriter(tmp_path / "user-2" / "trajectories.mmr") as writer:
        writer.append(short("recorded"))
    (tmp_path / "user-3").mkdir()  # of a key that has done nothing
    result = report(tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.count("1 training step in") == 4
    assert result.output.count("1 episode in") == 1


# The mismatch.


def test_the_mismatch_is_that_of_tokens_with_an_advantage():
    data = [
        datum(4, logprobs=(0, -1, -2, -3), advantages=(0, 1, -1, 0)),
        datum(2, logprobs=(-1, -1), advantages=(1, 1), mask=(1, 0)),
        datum(2, weights=(1, 1)),
    ]
    result = LossResult([floats(-9, -1.5, -2.25, -9), floats(-0.25, -9), floats(-9, -9)], {})
    assert mismatch(data, result) == {"mismatch:mean": pytest.approx((0.5 + 0.25 + 0.75) / 3), "mismatch:max": 0.75}


def test_there_is_no_mismatch_without_advantages_and_an_infinite_one_for_what_is_no_number():
    assert mismatch([datum(1, weights=(1,)), datum(1, logprobs=(-1,), advantages=(0,))],
                    LossResult([floats(-1), floats(-9)], {})) == {}  # fmt: skip
    found = mismatch([datum(1, logprobs=(-1,), advantages=(1,))], LossResult([floats(math.nan)], {}))
    assert found == {"mismatch:mean": math.inf, "mismatch:max": math.inf}
