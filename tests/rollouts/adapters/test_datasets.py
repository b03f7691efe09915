"""Rows of Hugging Face datasets: samples to Arrow and back, and record files as a stream."""

import sys

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from rollouts import Completion, TopLogprobs, Trajectory, WeightSpan
from rollouts.engines.protocol import FinishReason
from rollouts.errors import ArgumentError, PixelMismatchError
from rollouts.training import (
    TokenScores,
    TrainingBatch,
    samples_from_trajectory,
    with_scores,
)
from rollouts.training.adapters import AdapterError, dataset_row, record_dataset, sample_from_row
from rollouts.trajectory.token_node import TEACHER_COLUMNS
from transport import RecordWriter

datasets = pytest.importorskip("datasets")


def assert_equal(one, other):
    for name in ("token_ids", "loss_mask", "logprobs", "advantages"):
        column = getattr(other, name)
        assert getattr(one, name).dtype == column.dtype
        assert getattr(one, name).tolist() == column.tolist()
    assert (one.name, one.weight_spans) == (other.name, other.weight_spans)
    assert [place for _, place in one.media] == [place for _, place in other.media]
    for (item, _), (original, _) in zip(one.media, other.media, strict=True):
        assert np.array_equal(item["pixel_values"], original["pixel_values"])


def episode(renderer, number: int) -> Trajectory:
    """Two turns with one image of raw pixels each; log-probabilities are those of no model."""
    trajectory = Trajectory(episode_id=f"episode-{number}", group_id="g", seed=number)
    messages = []
    for turn in range(2):
        square = np.full((32, 32, 3), 20 * number + turn, dtype=np.uint8)
        messages.append(
            {"role": "user", "content": [{"type": "image", "image": square}, {"type": "text", "text": "?"}]}
        )
        prompt = renderer.render(messages, add_generation_prompt=True)
        ids = np.array([10 + number, 20 + turn, renderer.get_stop_token_ids()[0]], dtype=np.int32)
        completion = Completion(
            0,
            ids,
            -np.arange(len(ids), dtype=np.float32),
            FinishReason.STOP,
            int(ids[-1]),
            (WeightSpan("7", 0, len(ids)),),
        )
        answer = {"role": "assistant", "content": f"{number}{turn}"}
        trajectory.add_turn(prompt, completion, answer, messages=messages)
        messages.append(answer)
    trajectory.record_reward(float(number), {})
    return trajectory


@pytest.fixture
def record_files(renderer, tmp_path):
    """Three files with episodes 0 to 5; the last file has its two in one record."""
    paths = [tmp_path / f"{number}.mmr" for number in range(3)]
    for number, path in enumerate(paths):
        pair = [episode(renderer, 2 * number), episode(renderer, 2 * number + 1)]
        with RecordWriter(path) as out:
            for record in [pair] if number == 2 else pair:
                out.append(record)
    return paths


def test_rows_of_a_run_with_a_teacher_have_its_columns(renderer, tmp_path):
    trajectory = episode(renderer, 1)
    scores = []
    for leaf in trajectory.leaves():
        count = len(trajectory.token_ids(leaf))
        ids = np.arange(2 * count, dtype=np.int32).reshape(count, 2)
        logprobs = np.append(np.float32(np.nan), -np.arange(1, count, dtype=np.float32))
        scores.append(TokenScores(logprobs, TopLogprobs(ids, ids.astype(np.float32) / -8)))
    with RecordWriter(tmp_path / "scored.mmr") as out:
        out.append(with_scores(trajectory, scores))
    rows = list(record_dataset([tmp_path / "scored.mmr"]))
    for row, (logprobs, top, _) in zip(rows, scores, strict=True):
        sample = sample_from_row(row, renderer.processors)
        for column, given in zip(TEACHER_COLUMNS, (logprobs, *top), strict=True):
            np.testing.assert_array_equal(getattr(sample, column), given)
            assert getattr(sample, column).dtype == given.dtype
    older = {name: values for name, values in rows[0].items() if name not in TEACHER_COLUMNS}
    assert sample_from_row(older, renderer.processors).teacher_logprobs is None


@pytest.mark.slow
def test_workers_of_a_data_loader_read_each_file_once(record_files):
    streamed = record_dataset(record_files)
    with_workers = DataLoader(streamed, batch_size=None, num_workers=2)
    names = sorted(row["name"] for row in with_workers)
    assert names == sorted(row["name"] for row in streamed)
    assert len(set(names)) == len(names) > 0


def test_an_episode_with_no_advantage_is_left_out(record_files):
    streamed = record_dataset(record_files, advantage=lambda trajectory: 1.0 if trajectory.reward > 3 else None)
    assert {row["name"].partition("/")[0] for row in streamed} == {"episode-4", "episode-5"}


def test_a_record_that_is_no_trajectory_is_an_error_with_its_place(tmp_path):
    with RecordWriter(tmp_path / "x.mmr") as out:
        out.append([{"a": 1}])
    with pytest.raises(AdapterError, match=r"record 0 of .*x\.mmr: record: a dict is no Trajectory"):
        list(record_dataset([tmp_path / "x.mmr"]))
    with pytest.raises(ArgumentError, match="paths is"):
        record_dataset(str(tmp_path / "x.mmr"))


def test_another_processor_is_an_error_and_not_other_pixels(renderer, make_sample):
    row = dataset_row(make_sample(1, images=1))
    row["placeholders"][0]["mm_hash"] = row["placeholders"][0]["mm_hash"][:-4] + "beef"
    with pytest.raises(PixelMismatchError):
        sample_from_row(row, renderer.processors)


def test_rows_that_lack_something_are_refused_by_the_column(renderer, make_sample):
    row = dataset_row(make_sample(1, images=1))
    with pytest.raises(TypeError, match="logprobs"):
        sample_from_row({key: value for key, value in row.items() if key != "logprobs"}, renderer.processors)
    with pytest.raises(AdapterError, match="images: it is not a file with bytes for each of 1 ranges"):
        sample_from_row({**row, "images": [Image.new("RGB", (4, 4))]}, renderer.processors)
    with pytest.raises(AdapterError, match="images: it is not a file with bytes for each of 0 ranges"):
        sample_from_row({**row, "placeholders": []}, renderer.processors)


def test_an_array_image_has_another_hash_after_a_row_and_the_same_pixels(renderer):
    sample, *_ = samples_from_trajectory(episode(renderer, 1), advantage=1.0, processors=renderer.processors)
    of_file = sample_from_row(dataset_row(sample), renderer.processors)
    assert_equal(of_file, sample)
    assert all(one != other for (one, _), (other, _) in zip(of_file.media, sample.media, strict=True))
    first, second = (TrainingBatch.from_samples([each], pad_id=0) for each in (of_file, sample))
    assert first != second
    again = sample_from_row(dataset_row(of_file), renderer.processors)  # a file stays the same file
    assert TrainingBatch.from_samples([again], pad_id=0) == first


def test_without_datasets_the_error_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"the module datasets cannot be imported.*\[trainers\]"):
        record_dataset(["episodes.mmr"])
