"""Where metrics are written: JSON lines, TensorBoard's event files, Weights & Biases' offline files, training logs."""

import json
import logging
import math
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from renderers.errors import MissingExtraError
from renderers.installation import install_command
from rollouts.observability import (
    JsonLinesSink,
    MetricHistory,
    PrometheusEndpoint,
    RunMetrics,
    TensorBoardSink,
    TrainingLog,
    WandbSink,
)
from rollouts.observability.metric_sinks import last_step, read_json_lines
from rollouts.observability.training_log import read_step_mismatch
from rollouts.training.mismatch import ComparedTokens, MismatchReport
from transport import MalformedError, RecordReader, RecordWriter


def compared(version: str = "3") -> ComparedTokens:
    """Two tokens of one sample, the second after an image."""
    two = np.arange(2, dtype=np.int32)
    return ComparedTokens(
        sampler=np.array([-1.0, -2.0], np.float32),
        trainer=np.array([-1.5, -2.0], np.float32),
        sample=two * 0,
        position=two + 4,
        turn=two * 0,
        item=np.array([-1, 0], np.int32),
        version=two * 0,
        names=("episode/1",),
        media_hashes=("hash",),
        media_modalities=("image",),
        versions=(version,),
    )


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, whose reader is no Python: a log of LevelDB after 7 bytes of wandb's own.

    A block of 32 KiB has parts of records: checksum (4 bytes), length (2), kind (1 whole, 2 first, 3 middle, 4 last).
    """
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if not kind:
            return
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


class Failing:
    """A sink of a service that is away."""

    def __init__(self) -> None:
        self.writes = 0

    def write(self, section: str, step: int, values: object) -> None:
        self.writes += 1
        raise ConnectionError("the service is away")

    def close(self) -> None:
        raise ConnectionError("the service is away")


def test_lines_hold_steps_times_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path)
    sink.write("training", 3, {"loss": math.nan, "kl": -math.inf, "reward": 1})
    sink.close()
    assert json.loads(path.read_text())["metrics"] == {"loss": "NaN", "kl": "-Infinity", "reward": 1.0}
    (row,) = read_json_lines(path, [])
    assert (row["step"], row["metrics"]["kl"], row["metrics"]["reward"]) == (3, -math.inf, 1.0)
    assert math.isnan(row["metrics"]["loss"])


def test_an_incomplete_last_line_is_cut_off_before_the_next_one_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0, "metrics": {"a": 1, "b": "text"}}\n{"step": 2, "ti')
    sink = JsonLinesSink(path)
    sink.write("runner", 7, {"a": 2})
    sink.close()
    assert [(row["step"], row["metrics"]) for row in read_json_lines(path, [])] == [(1, {"a": 1.0}), (7, {"a": 2.0})]
    assert last_step(path) == 7
    assert last_step(tmp_path / "none.jsonl") == 0


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1, "time": NaN, "metrics": {}}',
        f'{{"step": 1{"0" * 400}, "time": 1.0, "metrics": {{}}}}',
        '{"step": 1, "time": 1.0, "metrics": [1]}',
        "[" * 100_000,
        "",
    ],
)
def test_a_line_of_other_types_is_named_and_the_next_one_is_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"step": 2, "time": 1.0, "metrics": {{}}}}\n')
    problems: list[str] = []
    assert [row["step"] for row in read_json_lines(path, problems)] == [2]
    assert len(problems) == 1
    assert problems[0].startswith("metrics.jsonl, line 1: ")


def test_a_line_of_any_length_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.observability.metric_sinks.MAX_LINE_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    row = '{"step": 2, "time": 1.0, "metrics": {}}'
    path.write_text(f"{'x' * 1000}\n{row}\n{'x' * 1000}")
    problems: list[str] = []
    assert [found["step"] for found in read_json_lines(path, problems)] == [2]
    assert [problem.partition(":")[0] for problem in problems] == ["metrics.jsonl, line 1", "metrics.jsonl, line 3"]


def test_a_sink_that_raises_is_logged_once_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, failing = tmp_path / "runner_metrics.jsonl", Failing()
    with caplog.at_level(logging.ERROR), MetricHistory(RunMetrics(), [failing, JsonLinesSink(path)], first_step=40):
        pass
    assert failing.writes == 1
    messages = [record.getMessage() for record in caplog.records]
    # It is closed nevertheless: what it received before may wait in it.
    assert messages == ["Failing failed; it gets no further metrics", "Failing could not be closed"]
    assert [row["step"] for row in read_json_lines(path, [])] == [40, 40]  # at the start and at the end


@pytest.mark.slow
def test_tensorboards_own_reader_finds_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path / "logs")
    sink.write("training", 1, {"loss": 0.5, "reward/part": 2})
    sink.write("training", 2, {"loss": 0.25})
    sink.close()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["training/loss", "training/reward/part"]
    assert [(event.step, event.value) for event in events.Scalars("training/loss")] == [(1, 0.5), (2, 0.25)]


@pytest.mark.slow
def test_wandbs_own_record_type_finds_the_metrics_of_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    sink = WandbSink("colours", directory=tmp_path, name="first", config={"seed": 3})
    sink.write("training", 1, {"loss": 0.5})
    sink.write("runner", 10, {"turns": 8})
    sink.close()
    wandb.teardown()  # as at the end of a process: wandb's own process writes what it still holds
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged: list[dict[str, object]] = []
    for data in log_records(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            logged.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    assert {name: logged[0][name] for name in ("training/loss", "training/step")} == {
        "training/loss": 0.5,
        "training/step": 1,
    }
    assert {name: logged[1][name] for name in ("runner/turns", "runner/step")} == {"runner/turns": 8, "runner/step": 10}
    assert ("a" * 40).encode() not in file.read_bytes()  # the key stays out of the file


@pytest.mark.parametrize(
    ("module", "extra", "make"),
    [
        ("tensorboardX", "tensorboard", TensorBoardSink),
        ("wandb", "wandb", lambda directory: WandbSink("project", directory=directory)),
        ("prometheus_client", "prometheus", lambda directory: PrometheusEndpoint(RunMetrics())),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch, module, extra, make) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command(extra))):
        make(tmp_path / "logs")


def test_a_failing_sink_of_a_training_log_loses_no_step_of_the_others_and_leaves_no_file_open(tmp_path: Path) -> None:
    failing, after = Failing(), JsonLinesSink(tmp_path / "after.jsonl")
    log = TrainingLog(tmp_path, sinks=[failing, after])
    with pytest.raises(ConnectionError):
        log.write(1, {"loss": 0.5}, mismatch=MismatchReport(compared()))
    with pytest.raises(ConnectionError):
        log.close()
    for name in ("training.jsonl", "after.jsonl"):
        assert [row["step"] for row in read_json_lines(tmp_path / name, [])] == [1]
    with pytest.raises(ValueError, match="closed file"):
        after.write("training", 2, {})
    with RecordWriter(tmp_path / "mismatch.mmr"), RecordReader(tmp_path / "mismatch.mmr") as reader:
        assert len(reader) == 1  # and the file is not locked: its writer is closed


RECORD = {
    "step": 1,
    **{name: np.zeros(1, np.float32) for name in ("sampler", "trainer")},
    **{name: np.zeros(1, np.int32) for name in ("sample", "position", "item")},
    "current": np.ones(1, bool),
    "names": ["a/0"],
    "media_modalities": ["image"],
}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"names": "text"}, "names is no list of texts"),
        ({"item": np.zeros(1, np.float32)}, "item is no array of numbers"),
        ({"current": np.zeros(1, np.int32)}, "current is no array of numbers"),
        ({"trainer": np.zeros(2, np.float32)}, "trainer has another length"),
        ({"item": np.array([7], np.int32)}, "item has an index outside media_modalities"),
        ({"sample": np.array([-1], np.int32)}, "sample has an index outside names"),
        ({"more": 1}, "record 0: it does not hold the columns"),
    ],
)
def test_a_record_that_is_no_step_is_refused(tmp_path: Path, changed: dict[str, object], reason: str) -> None:
    path = tmp_path / "mismatch.mmr"
    with RecordWriter(path) as writer:
        writer.append({**RECORD, **changed})
    with RecordReader(path) as reader, pytest.raises(MalformedError, match=reason):
        read_step_mismatch(reader, 0, path)
