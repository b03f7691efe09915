"""Checkpoints of a Trainer: training goes on as if it had not stopped, and a killed writer leaves the old file."""

import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trainer_checks import SMALL, random_weights

from rollouts.errors import ArgumentError
from rollouts.training import TrainingSample
from rollouts.training.trainer import AdamParams, Trainer

FILE = "checkpoint.safetensors"
STEP = AdamParams(learning_rate=0.01, weight_decay=0.01, grad_clip_norm=1.0)


@pytest.fixture
def data():
    samples = []
    for seed, length in enumerate([9, 17, 5]):
        ids = np.random.default_rng(seed).integers(3, 300, length).astype(np.int32)
        zeros = np.zeros(length, np.float32)
        samples.append(TrainingSample(ids, np.arange(length) > 1, zeros, zeros + 1))
    return [random_weights(sample, seed) for seed, sample in enumerate(samples)]


def trainer_of(directory, lora):
    trainer = Trainer.from_pretrained(directory, device="cpu")
    trainer.create_model("a", lora=lora)
    return trainer


def steps(trainer, data, count):
    for _ in range(count):
        trainer.forward_backward("a", data, "cross_entropy")
        trainer.optim_step("a", STEP)


def tensors(trainer, directory):
    trainer.save("a", directory)
    return load_file(directory / FILE)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("lora", [SMALL, None], ids=["adapter", "all parameters"])
def test_training_goes_on_bit_for_bit_as_if_it_had_not_stopped(tiny_model_dir, data, tmp_path, lora):
    straight = trainer_of(tiny_model_dir, lora)
    steps(straight, data, 2)
    straight.save("a", tmp_path / "middle")
    steps(straight, data, 2)
    resumed = trainer_of(tiny_model_dir, lora if lora is None else replace(lora, seed=9))
    steps(resumed, data[:1], 1)  # what it has learned is replaced
    resumed.forward_backward("a", data, "cross_entropy")  # gradients that are waiting are forgotten
    resumed.load("a", tmp_path / "middle")
    steps(resumed, data, 2)
    assert_equal(tensors(straight, tmp_path / "straight"), tensors(resumed, tmp_path / "resumed"))

    without = trainer_of(tiny_model_dir, lora)
    without.load("a", tmp_path / "middle", with_optimizer=False)
    steps(without, data, 2)
    names = [name for name in load_file(tmp_path / "middle" / FILE) if name.startswith("parameters.")]
    one, other = tensors(without, tmp_path / "without"), tensors(straight, tmp_path / "straight")
    assert any(not torch.equal(one[name], other[name]) for name in names)


def test_a_file_says_what_it_is_and_has_the_state_of_the_optimizer_after_a_step(tiny_model_dir, data, tmp_path):
    trainer = trainer_of(tiny_model_dir, SMALL)
    trainer.save("a", tmp_path / "new")
    steps(trainer, data, 1)
    trainer.save("a", tmp_path / "stepped")
    new, stepped = ({key.partition(".")[0] for key in load_file(tmp_path / name / FILE)} for name in ("new", "stepped"))
    assert (new, stepped) == ({"parameters"}, {"parameters", "step", "exp_avg", "exp_avg_sq"})
    with safe_open(tmp_path / "new" / FILE, "pt") as file:
        assert json.loads(file.metadata()["trainer"])["model_type"] == "qwen3_vl"
    trainer.load("a", tmp_path / "new")


KILLED = """
import os, signal, sys
import safetensors.torch, rollouts.training.checkpoints as checkpoints, rollouts.files as files
from rollouts.training.trainer import AdamParams, LoraOptions, Trainer
from trainer_checks import SMALL
import pickle

base, directory, data, moment = sys.argv[1:]
trainer = Trainer.from_pretrained(base, device="cpu")
trainer.create_model("a", lora=SMALL)
trainer.load("a", directory)
with open(data, "rb") as file:
    rows = pickle.load(file)
trainer.forward_backward("a", rows, "cross_entropy")
trainer.optim_step("a", AdamParams(learning_rate=0.01))
save_file, replace = checkpoints.save_file, os.replace


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(tensors, path, metadata=None):
    save_file(tensors, path, metadata=metadata)
    if moment == "half of the file is written":
        os.truncate(path, os.path.getsize(path) // 2)
    if moment != "the file is in its place":
        killed()


def replaced(one, other):
    replace(one, other)
    killed()


checkpoints.save_file = half_written
files.os.replace = replaced
trainer.save("a", directory)
"""


@pytest.mark.parametrize(
    ("moment", "is_new"),
    [("half of the file is written", False), ("all of the file is written", False), ("the file is in its place", True)],
)
@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(
    tiny_model_dir, data, tmp_path, moment, is_new
):
    trainer = trainer_of(tiny_model_dir, SMALL)
    steps(trainer, data, 1)
    before = tensors(trainer, tmp_path / "checkpoint")
    (tmp_path / "rows").write_bytes(pickle.dumps(data))
    arguments = [tiny_model_dir, tmp_path / "checkpoint", tmp_path / "rows", moment]
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{KILLED}", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    found = load_file(tmp_path / "checkpoint" / FILE)
    assert any(not torch.equal(found[name], before[name]) for name in before) is is_new
    resumed = trainer_of(tiny_model_dir, SMALL)
    resumed.load("a", tmp_path / "checkpoint")
    steps(resumed, data, 1)
    assert_equal(tensors(resumed, tmp_path / "checkpoint"), tensors(resumed, tmp_path / "again"))
    left = {path.name for path in (tmp_path / "checkpoint").iterdir()} - {FILE}
    assert all(name.startswith(f".{FILE}.") and name.endswith(".partial") for name in left)  # of the killed one


def without(name):
    return lambda saved: {key: value for key, value in saved.items() if not key.startswith(name)}


def first_with(part, change):
    def changed(saved):
        name = next(key for key in sorted(saved) if key.startswith(part))
        return {**saved, name: change(saved[name])}

    return changed


WRONG_FILES = {
    "a parameter of another shape": (first_with("parameters.", lambda value: value[:1].clone()), "this model has"),
    "a parameter of another dtype": (first_with("parameters.", lambda value: value.double()), "torch.float64"),
    "a state of another shape": (first_with("exp_avg.", lambda value: value[:1].clone()), "exp_avg of"),
    "no state of one kind": (without("exp_avg_sq"), "its state of the optimizer lacks tensors"),
    "no parameters": (without("parameters"), "it lacks"),
    "another tensor": (lambda saved: {**saved, "parameters.x": torch.zeros(1)}, "which this model has not"),
}


@pytest.mark.parametrize("fault", WRONG_FILES)
def test_a_file_of_other_tensors_is_refused_and_nothing_changes(tiny_model_dir, data, tmp_path, fault):
    change, reason = WRONG_FILES[fault]
    trainer = trainer_of(tiny_model_dir, SMALL)
    steps(trainer, data, 1)
    trainer.save("a", tmp_path / "checkpoint")
    with safe_open(tmp_path / "checkpoint" / FILE, "pt") as file:
        metadata = file.metadata()
    saved = load_file(tmp_path / "checkpoint" / FILE)
    save_file(change(saved), tmp_path / "checkpoint" / FILE, metadata=metadata)
    steps(trainer, data, 1)
    before = tensors(trainer, tmp_path / "before")
    with pytest.raises(ArgumentError, match=rf"{reason}.*Nothing was changed"):
        trainer.load("a", tmp_path / "checkpoint")
    assert_equal(tensors(trainer, tmp_path / "after"), before)


def test_a_checkpoint_of_something_else_is_refused(tiny_model_dir, tmp_path):
    trainer = trainer_of(tiny_model_dir, SMALL)
    trainer.save("a", tmp_path / "checkpoint")
    trainer.create_model("b", lora=replace(SMALL, rank=2))
    with pytest.raises(ArgumentError, match=r"it was saved with lora=\{'rank': 4.*rank=2"):
        trainer.load("b", tmp_path / "checkpoint")
    with pytest.raises(ArgumentError, match=r"there is no file checkpoint.safetensors in it"):
        trainer.load("a", tmp_path)
    save_file({"parameters.x": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(ArgumentError, match=r"none of Trainer\.save"):
        trainer.load("a", tmp_path)
    (tmp_path / FILE).write_bytes(b"\0" * 20)
    with pytest.raises(ArgumentError, match="cannot be read"):
        trainer.load("a", tmp_path)


def test_a_directory_for_the_sampler_is_new_or_refused(tiny_model_dir, tmp_path):
    trainer = trainer_of(tiny_model_dir, SMALL)
    left = tmp_path / "deep" / f".adapter.{os.getpid()}.partial"  # of a process that was killed, with our number
    left.mkdir(parents=True)
    (left / "adapter_model.safetensors").write_bytes(b"half")
    trainer.save_for_sampler("a", f"{tmp_path / 'deep' / 'adapter'}/")
    assert sorted(path.name for path in (tmp_path / "deep" / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["adapter"]
    with pytest.raises(ArgumentError, match="it exists already"):
        trainer.save_for_sampler("a", tmp_path / "deep" / "adapter")
