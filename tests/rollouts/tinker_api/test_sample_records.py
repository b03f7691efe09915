"""Sampled sequences in a trajectory file: prompts that extend each other are one tree, and memory is bounded."""

import logging
from pathlib import Path

import numpy as np
import pytest
from training_samples import image

from renderers import PlaceholderRange
from rollouts import FinishReason
from rollouts.tinker.requests import ModelInput, SampledSequence, SampleRequest, SampleResult
from rollouts.tinker.sample_records import SampleRecords
from rollouts.trajectory_files import read_episodes
from transport import RecordReader


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(ids, *placed, **options):
    media = [(item, PlaceholderRange(at, item.num_tokens)) for item, at in placed]
    return SampleRequest(ModelInput(np.array(ids, np.int64), media), **options)


def result(*sequences, stopped=True):
    return SampleResult(
        [
            SampledSequence(np.array(ids, np.int32), -np.arange(1, len(ids) + 1, dtype=np.float32) / 10, stopped)
            for ids in sequences
        ]
    )


def read(path: Path):
    with RecordReader(path) as reader:
        problems: list[str] = []
        episodes = list(read_episodes(reader, problems))
    assert problems == []
    return [episode.trajectory for episode in episodes]


def paths(trajectory):
    return sorted(trajectory.token_ids(leaf).tolist() for leaf in trajectory.leaves())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trajectories.mmr"


def test_turns_that_continue_each_other_are_one_row_of_tokens_with_their_log_probabilities(path):
    records = SampleRecords(path, decode=lambda ids: " ".join(map(str, ids)))
    records.sampled("s", request([1, 2, 3]), result([10, 11]), "0")
    records.sampled("s", request([1, 2, 3, 10, 11, 4, 5]), result([12], stopped=False), "7")
    assert read(path) == []
    records.ended("s")
    (tree,) = read(path)
    records.close()
    assert paths(tree) == [[1, 2, 3, 10, 11, 4, 5, 12]]
    assert tree.forks == 0
    assert tree.group_id == "s"
    assert tree.done
    assert [turn.finish_reason for turn in tree.turns] == [FinishReason.STOP, FinishReason.LENGTH]
    assert [turn.message["content"] for turn in tree.turns] == ["10 11", "12"]
    assert [span.version for node in tree.nodes for span in node.weight_spans] == ["0", "7"]
    assert tree.nodes[1].logprobs.tolist() == pytest.approx([-0.1, -0.2])


def test_samples_of_one_prompt_are_branches_whether_one_request_has_them_or_many(path):
    records = SampleRecords(path)
    records.sampled("s", request([1, 2]), result([10], [11], [10]), "0")
    records.sampled("s", request([1, 2]), result([12]), "0")
    records.sampled("s", request([1, 2, 11, 3]), result([13]), "0")
    records.close()
    (tree,) = read(path)
    assert paths(tree) == [[1, 2, 10], [1, 2, 10], [1, 2, 11, 3, 13], [1, 2, 12]]
    assert sum(map(len, tree.nodes)) == 2 + 5 + 1


def test_prompts_that_do_not_extend_each_other_and_sessions_are_trees_of_their_own(path):
    records = SampleRecords(path)
    records.sampled("s", request([1, 2, 3]), result([10]), "0")
    records.sampled("s", request([1, 2, 4]), result([10]), "0")
    records.sampled("s", request([1, 2]), result([10]), "0")
    records.sampled("other", request([1, 2, 3]), result([10]), "0")
    records.sampled("s", request([1, 2, 4, 10, 5]), result([11]), "0")  # of two that it extends the longer one
    records.ended("s")
    assert sorted(map(paths, read(path))) == [[[1, 2, 3, 10]], [[1, 2, 4, 10, 5, 11]], [[1, 2, 10]]]
    records.close()
    trees = read(path)
    assert len(trees) == 4
    assert len({tree.episode_id for tree in trees}) == 4
    assert [tree.group_id for tree in trees].count("other") == 1


def test_equal_tokens_with_other_images_are_other_trees_and_an_image_is_kept_once(path):
    red, blue = image(16, seed=1), image(16, seed=2)
    again = image(16, seed=1)
    assert again.source is not red.source
    records = SampleRecords(path)
    ids = [1, 7, 7, 7, 7, 2]
    records.sampled("s", request(ids, (red, 1)), result([10]), "0")
    records.sampled("s", request(ids, (blue, 1)), result([10]), "0")
    longer = [*ids, 10, 7, 7, 7, 7, 3]
    records.sampled("s", request(longer, (again, 1), (blue, 7)), result([11]), "0")
    sources = {id(one.source) for tree in records._trees.values() for one in tree.trajectory.all_media()}
    assert len(sources) == 2
    records.close()
    first, second = sorted(read(path), key=lambda tree: len(tree.turns))
    assert [one.source.digest for one in first.all_media()] == [blue.source.digest]
    assert paths(second) == [[*longer, 11]]
    assert [one.source.digest for one in second.all_media()] == [red.source.digest, blue.source.digest]
    data = path.read_bytes()
    assert data.count(bytes(red.source.data)) == data.count(bytes(blue.source.data)) == 1


def test_a_tree_is_written_when_it_was_idle_and_then_begins_anew(path):
    clock = Clock()
    records = SampleRecords(path, idle_seconds=60, clock=clock)
    records.sampled("s", request([1]), result([10]), "0")
    clock.now = 30
    records.sampled("s", request([2]), result([10]), "0")
    records.sampled("s", request([1, 10, 3]), result([11]), "0")
    clock.now = 89
    records.write_idle()
    assert read(path) == []
    clock.now = 90
    records.sampled("s", request([1, 10, 3]), result([12]), "0")
    assert sorted(map(paths, read(path))) == [[[1, 10, 3, 11]], [[2, 10]]]
    assert read(path)[1].seconds == 30
    records.close()
    assert paths(read(path)[2]) == [[1, 10, 3, 12]]


def test_memory_is_bounded_by_writing_what_was_used_least_recently(path):
    records = SampleRecords(path, max_bytes=20_000)
    for first in range(100):
        records.sampled("s", request([1000]), result([first]), "0")
        records.sampled("s", request([first, 2]), result([10]), "0")
        assert records._nbytes <= 20_000
        assert records._nbytes == sum(tree.nbytes for tree in records._trees.values())
        assert sum(records._lengths["s"].values()) == len(records._trees)
    assert paths(read(path)[0]) == [[0, 2, 10]]
    records.close()
    assert sum(len(tree.turns) for tree in read(path)) == 200
    assert records._lengths == {}
    assert records._nbytes == 0


def test_a_request_for_the_log_probabilities_of_a_prompt_is_no_sample(path):
    records = SampleRecords(path)
    records.sampled("s", request([1, 2], prompt_logprobs=True, max_tokens=1), result([10]), "0")
    records.sampled("s", request([1, 3], prompt_logprobs=True, max_tokens=2), result([10]), "0")
    records.close()
    assert list(map(paths, read(path))) == [[[1, 3, 10]]]


def test_a_sample_that_cannot_be_stored_is_logged_and_the_others_are_recorded(path, caplog):
    records = SampleRecords(path)
    wrong = SampleResult([SampledSequence(np.array([1], np.int32), np.array([np.nan], np.float32), True)])
    with caplog.at_level(logging.ERROR):
        records.sampled("s", request([1]), wrong, "0")
    assert "a sample of session s is not recorded" in caplog.text
    records.sampled("s", request([1]), result([10], []), "0")
    records.close()
    (tree,) = read(path)
    assert paths(tree) == [[1], [1, 10]]


def test_a_full_disk_costs_the_record_and_not_the_sample(path, caplog, monkeypatch):
    records = SampleRecords(path)
    records.sampled("s", request([1]), result([10]), "0")

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(records._writer, "append", full)
        records.ended("s")
    assert "No space left on device" in caplog.text
    records.sampled("s", request([2]), result([10]), "0")
    records.close()
    assert list(map(paths, read(path))) == [[[2, 10]]]
