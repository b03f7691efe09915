"""Runs and checkpoints on disk: what was saved whole is found again, by names and URIs that lead nowhere else."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from rollouts.errors import ArgumentError
from rollouts.serve.errors import RequestError
from rollouts.tinker.run_directory import KEPT_EXPIRED, RunDirectory, TrainingRun

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RUN = TrainingRun("s:train:0", "tiny", "s", {"rank": 8, "train_mlp": True}, START, {"who": "me"})
ESCAPES = ["..", ".", "", "a/b", "../x", "a\\b", ".hidden", "a\0b", "a\n", "x" * 129, "ä", "-a", "a.json"]


def path_of(directory, uri):
    return directory.path(directory.find(uri))


class Clock:
    """A time that tests set."""

    def __init__(self):
        self.time = START

    def __call__(self):
        return self.time


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def directory(tmp_path, clock):
    runs = RunDirectory(tmp_path / "runs", now=clock)
    runs.add_run(RUN)
    return runs


def save(directory, name, *, kind="weights", content=b"12345", model_id=RUN.model_id, **options):
    with directory.saving(model_id, kind, name, **options) as path:
        path.mkdir(exist_ok=True)
        (path / "file").write_bytes(content)
    return directory.checkpoint(model_id, kind, name)


@pytest.mark.parametrize("name", ESCAPES)
def test_a_name_that_is_no_plain_name_is_refused_before_anything_is_written(directory, name):
    before = sorted(directory.directory.rglob("*"))
    with pytest.raises(ArgumentError), directory.saving(RUN.model_id, "weights", name):
        pytest.fail("the block ran")
    with pytest.raises((ArgumentError, RequestError)):
        path_of(directory, f"tinker://{RUN.model_id}/weights/{name}")
    if not name.endswith(".json"):
        with pytest.raises(ArgumentError):
            directory.add_run(TrainingRun(name, "tiny", "s", None, START))
    assert sorted(directory.directory.rglob("*")) == before


@pytest.mark.parametrize("linked", ["", "weights", "weights/a"])
def test_links_are_not_followed(directory, tmp_path, linked):
    """A run, a kind or a checkpoint that is a link is no such thing."""
    saved = save(directory, "a")
    place = directory.directory / RUN.model_id / linked
    elsewhere = tmp_path / "elsewhere"
    os.rename(place, elsewhere)
    place.symlink_to(elsewhere)
    with pytest.raises(RequestError) as caught:
        path_of(directory, saved.uri)
    assert caught.value.status == 404
    assert directory.all_checkpoints() == []
    with pytest.raises(RequestError):
        directory.delete(saved)
    with pytest.raises(RequestError):
        save(directory, "a", overwrite=True)
    assert directory.has_run(RUN.model_id) == (linked != "")
    assert list(elsewhere.rglob("file")) != []


def test_overwriting_replaces_weights_and_only_those(directory, clock):
    save(directory, "a", content=b"old", ttl_seconds=9)
    clock.time += timedelta(seconds=1)
    replaced = save(directory, "a", content=b"newer", overwrite=True)
    assert (replaced.size_bytes, replaced.created, replaced.expires_at) == (5, clock.time, None)
    save(directory, "a", kind="sampler_weights")
    with pytest.raises(ArgumentError, match="sampler_weights of this name"):
        save(directory, "a", kind="sampler_weights", overwrite=True)


def test_a_failed_save_over_weights_leaves_the_old_ones(directory):
    saved = save(directory, "a")
    with pytest.raises(OSError, match="full"), directory.saving(RUN.model_id, "weights", "a", overwrite=True):
        raise OSError("full")
    assert directory.find(saved.uri) == saved
    assert (path_of(directory, saved.uri) / "file").read_bytes() == b"12345"


def test_two_savers_cannot_write_the_same_name_at_once(directory):
    with directory.saving(RUN.model_id, "weights", "a") as path:
        path.mkdir()
        with pytest.raises(ArgumentError, match="is being written"):
            save(directory, "a")
        assert directory.checkpoints(RUN.model_id) == []  # not whole yet
    assert len(directory.checkpoints(RUN.model_id)) == 1


KILLED = """
import os, signal, sys
from rollouts.files import replaced_path
from rollouts.tinker.run_directory import RunDirectory
runs = RunDirectory(sys.argv[1])
with runs.saving("s:train:0", "sampler_weights", "a") as path:
    if sys.argv[2] == "partial":
        with replaced_path(path) as path:
            path.mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
    path.mkdir()
    (path / "half").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["partial", "in place"])
def test_what_a_killed_process_left_is_no_checkpoint_and_does_not_block_its_name(directory, how):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(directory.directory), how], check=False)
    assert killed.returncode == -signal.SIGKILL
    place = directory.directory / RUN.model_id / "sampler_weights"
    assert len(list(place.iterdir())) == 1
    again = RunDirectory(directory.directory)
    assert again.all_checkpoints() == []
    with pytest.raises(RequestError):
        path_of(again, "tinker://s:train:0/sampler_weights/a")
    saved = save(again, "a", kind="sampler_weights")
    assert list(again.files(saved)) == ["file"]
    assert sorted(path.name for path in place.iterdir()) == ["a", "a.json"]


def test_expired_checkpoints_are_not_found_and_deleted_an_hour_later(directory, clock):
    saved = [save(directory, name, ttl_seconds=10) for name in "abc"]
    kept = save(directory, "d")
    clock.time += timedelta(seconds=9)
    assert directory.find(saved[0].uri) == saved[0]
    changed = directory.set_ttl(saved[2], 100_000)
    assert changed.expires_at == START + timedelta(seconds=100_009)
    clock.time += timedelta(seconds=1)
    directory.tidy()
    with pytest.raises(RequestError, match="has expired"):
        path_of(directory, saved[0].uri)
    assert directory.path(saved[0]).exists()
    clock.time += KEPT_EXPIRED
    directory.tidy()
    assert not any(directory.path(each).exists() for each in saved[:2])
    assert {each.name for each in directory.all_checkpoints()} == {"c", "d"}
    assert directory.set_ttl(changed, None).expires_at is None
    clock.time += timedelta(days=10_000)
    assert {each.name for each in directory.all_checkpoints()} == {"c", kept.name}


def test_a_save_under_the_name_of_an_expired_checkpoint_is_none_of_it_before_it_ends(directory, clock):
    save(directory, "a", ttl_seconds=10)
    clock.time += timedelta(seconds=10)
    with directory.saving(RUN.model_id, "weights", "a") as path:
        path.mkdir()
        assert not path.with_name("a.json").exists()  # of the old one, if this process is killed here
    assert directory.checkpoint(RUN.model_id, "weights", "a").expires_at is None


def test_files_that_others_changed_are_passed_over(directory, caplog):
    kept, changed, lost = save(directory, "a"), save(directory, "b"), save(directory, "c")
    directory.path(changed).with_name("b.json").write_text("[")
    (directory.path(lost) / "file").unlink()
    directory.path(lost).rmdir()
    (directory.directory / "foreign").mkdir()
    (directory.directory / "foreign" / "run.json").write_text(json.dumps({"base_model": 1}))
    (directory.directory / "notes.txt").write_text("x")
    assert directory.all_checkpoints() == [kept]
    assert "b.json" in caplog.text


def test_the_files_of_a_checkpoint_are_named_by_their_paths_in_it_without_links_and_hidden_ones(directory):
    with directory.saving(RUN.model_id, "external_weights", "a") as path:
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "file").write_bytes(b"123")
        (path / ".left.1.partial").write_bytes(b"x")
        (path / "link").symlink_to("/etc/passwd")
    saved = directory.checkpoint(RUN.model_id, "external_weights", "a")
    assert directory.files(saved) == {"deep/file": path / "deep" / "file"}
    assert saved.size_bytes == 3


def test_unlisted_weights_are_no_checkpoints_and_go_with_their_session_or_server(directory):
    def written(name):
        path = directory.unlisted(RUN.model_id, name)
        assert not path.exists()
        path.mkdir()
        (path / "file").write_bytes(b"x")
        return path

    assert written("session-1") == written("session-1").parent / "session-1"  # what was there is removed
    assert directory.all_checkpoints() == []
    with pytest.raises(RequestError):
        path_of(directory, f"tinker://{RUN.model_id}/unlisted/session-1")
    path = written("session-1")
    directory.remove_unlisted("another")
    assert path.exists()
    directory.remove_unlisted(RUN.session_id)
    assert not path.exists()
    path = written("session-2")
    again = RunDirectory(directory.directory)
    assert path.exists()  # only a server removes what servers leave
    again.own()
    assert not path.exists()
    path = written("session-3")
    with pytest.raises(ArgumentError, match="another server"):
        RunDirectory(directory.directory).own()
    assert path.exists()
    again.release()
    RunDirectory(directory.directory).own()
    assert not path.exists()
    with pytest.raises(ArgumentError):
        directory.unlisted(RUN.model_id, "../a")
