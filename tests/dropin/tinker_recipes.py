"""Runs recipes of tinker-cookbook 0.6.1, unmodified, against `rollouts tinker`, and checks what they reach.

    python tests/dropin/tinker_recipes.py [--quick] [--out DIR] [RECIPE ...]

A tiny model with random weights, named as a model that the recipes know, learns on the data sets of
`examples/tinker_recipe.py`: the format of answers (`sl_loop`); from there the right answers, by rewards of groups
(`rl_loop`, `math_rl`); short answers rather than long ones, with a loss that the client computes (`preference.dpo`);
the digits of images (`vlm_classifier`), with the loss of each step as in `tinker_own_loop.py`. `resume` kills the
server (kill -9) in mid-run and starts both again: the weights must be those of a run without it. Prints a line for each
recipe, and returns 1 if one misses its mark. --out keeps the metrics of all recipes and the files of the servers. Needs
the project's `dev` extra; the recipes run in the environment of `tinker_environment.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tinker_environment
import torch
from safetensors.numpy import load_file
from tinker_own_loop import own_losses

from rollouts.testing import tiny_qwen3_vl

_PROJECT = Path(__file__).resolve().parents[2]
# The recipes look up renderers by this name, and load the tokenizer from the directory of this name.
_MODEL = "Qwen/Qwen3-VL-30B-A3B-Instruct"
Rows = list[dict[str, Any]]


class MissedError(Exception):
    """A recipe ended with an error, or did not reach what it must."""


class Server:
    """`rollouts tinker` as a process of its own. `url` is its address; the same one after a restart."""

    def __init__(self, directory: Path, options: Sequence[str], variables: Mapping[str, str]) -> None:
        self._directory = directory
        self._command = [str(Path(sys.executable).with_name("rollouts")), "tinker", *options]
        self._variables = variables
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self.start(0)

    def start(self, port: int | None = None) -> None:
        port = int(self.url.rpartition(":")[2]) if port is None else port
        command = [*self._command, "--port", str(port)]
        with (self._directory / "server.log").open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, cwd=self._directory, stdout=subprocess.PIPE, stderr=log, text=True, env=self._variables
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if (found := re.search(r"http://[\w.:]+", line)) is None:
            raise MissedError(f"the server did not start: {line!r}, see {self._directory / 'server.log'}")
        self.url = found.group()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.communicate()


@contextmanager
def serving(directory: Path, options: Sequence[str], variables: Mapping[str, str]) -> Iterator[Server]:
    server = Server(directory, options, variables)
    try:
        yield server
    finally:
        server.kill(signal.SIGTERM)


def _environment() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-local", "PYTHONPATH": str(_PROJECT)}
    return {**os.environ, **offline}


class Recipes:
    """Runs recipes in `directory` against `server`; `quick`: fewer steps and lower marks."""

    def __init__(self, directory: Path, server: Server, *, quick: bool) -> None:
        self._directory = directory
        self._server = server
        self.quick = quick
        self._supervised: str | None = None

    def start(self, module: str, *, record: str | None = None, **options: object) -> subprocess.Popen[bytes]:
        """Start a recipe; `record`: the file that `tinker_recorded_recipe.py` writes."""
        words = [f"{key}={value}" for key, value in options.items()]
        address = [f"base_url={self._server.url}", f"model_name={_MODEL}"]
        script = [_PROJECT / "examples" / "tinker_recipe.py"]
        if record is not None:
            script = [_PROJECT / "tests" / "dropin" / "tinker_recorded_recipe.py", self._directory / record]
        with (self._directory / "recipes.log").open("ab") as log:
            return subprocess.Popen(
                [tinker_environment.PYTHON, *script, module, *address, *words],
                cwd=self._directory,
                env=_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, module: str, log: str, **options: object) -> Rows:
        """Run it to its end; returns the lines of metrics that it wrote under `log`."""
        if status := self.start(module, **options).wait():
            raise MissedError(f"{module} ended with status {status}, see {self._directory / 'recipes.log'}")
        return self.metrics(log)

    def metrics(self, log: str) -> Rows:
        (path,) = (self._directory / log).rglob("metrics.jsonl")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def last_state(self, log: str) -> str:
        """The URI of the last checkpoint that a recipe can go on from."""
        lines = (self._directory / log / "checkpoints.jsonl").read_text(encoding="utf-8").splitlines()
        return next(str(row["state_path"]) for row in map(json.loads, reversed(lines)) if "state_path" in row)

    def begin_at(self, log: str, state: str) -> None:
        """A recipe with this log goes on from `state` at its first batch."""
        (self._directory / log).mkdir()
        record = {"name": "start", "batch": 0, "state_path": state}
        (self._directory / log / "checkpoints.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")

    def weights(self, state: str) -> dict[str, np.ndarray]:
        """The tensors of a checkpoint `tinker://MODEL/weights/NAME`, with the state of AdamW."""
        directory = self._directory / "tinker-runs" / state.removeprefix("tinker://")
        files = sorted(directory.glob("*.safetensors"))
        return {f"{file.name} {name}": value for file in files for name, value in load_file(file).items()}

    # Each returns what it found, in words.

    def supervised(self) -> str:
        steps = 150 if self.quick else 500
        rows = self.run(
            "sl_loop", "sl", log_path="sl", batch_size=16, learning_rate=5e-3, max_steps=steps, save_every=0,
            train_on_what="last_assistant_message",
        )  # fmt: skip
        self._supervised = self.last_state("sl")
        return _falls(rows, "train_mean_nll", to=0.25)

    @property
    def supervised_state(self) -> str:
        if self._supervised is None:
            self.supervised()
        assert self._supervised is not None
        return self._supervised

    def loop_of_rewards(self) -> str:
        self.begin_at("rl", self.supervised_state)
        rows = self.run(
            "rl_loop", "rl", log_path="rl", batch_size=18, group_size=8, learning_rate=2e-3, max_tokens=16,
            loss_fn="importance_sampling", max_steps=24 if self.quick else 60, save_every=0,
        )  # fmt: skip
        # Chance in sampling is 0.02, chance in what is learnt is more.
        return _rises(rows, "reward/total", by=0.02 if self.quick else 0.15)

    def groups(self) -> str:
        rows = self.run(
            "math_rl.train", "math", log_path="math", env="gsm8k", groups_per_batch=18, group_size=8,
            learning_rate=2e-3, max_tokens=16, loss_fn="ppo", eval_every=0, save_every=0,
            load_checkpoint_path=self.supervised_state, max_steps=24 if self.quick else 60,
        )  # fmt: skip
        return _rises(rows, "env/all/correct", by=0.02 if self.quick else 0.15)

    def preferences(self) -> str:
        rows = self.run(
            "preference.dpo.train", "dpo", log_path="dpo", dataset="hhh", batch_size=16, learning_rate=1e-3,
            max_steps=10 if self.quick else 40,
        )  # fmt: skip
        return _falls(rows, "dpo_loss", to=0.5) + ", " + _rises(rows, "margin", by=0.1)

    def images(self) -> str:
        epochs, mark, compared = (6, 0.4, 60) if self.quick else (20, 0.9, None)
        rows = self.run(
            "vlm_classifier.train", "vlm", experiment_dir="vlm", renderer_name="qwen3_vl_instruct",
            learning_rate=5e-3, num_epochs=epochs, eval_every=45, save_every=0, max_tokens=8, n_eval=128,
            record="vlm-steps",
        )  # fmt: skip
        accuracy = [row["accuracy"] for row in rows if "accuracy" in row]
        _check(accuracy[-1] >= mark, f"accuracy {accuracy[-1]:.3f}, must reach {mark}")
        found = [_falls(rows, name, to=0.3) for name in ("train_mean_nll", "test/nll")]
        return ", ".join(
            [*found, f"accuracy {accuracy[0]:.3f} to {accuracy[-1]:.3f}", self._distance_to_own_loop(rows, compared)]
        )

    def _distance_to_own_loop(self, rows: Rows, count: int | None) -> str:
        own = np.array(list(own_losses(self._directory / _MODEL, self._directory / "vlm-steps", count)))
        np.savetxt(self._directory / "vlm-own-losses", own)
        distance = np.abs(own - [row["train_mean_nll"] for row in rows][: len(own)])
        _check(
            len(own) >= 60 and distance[:60].max() < 1e-5,
            f"the losses of our own loop differ by {distance[:60].max():.1e}",
        )
        return f"largest difference to the loss of our own loop in 60 steps {distance[:60].max():.1e}"

    def resume(self) -> str:
        state = self.supervised_state
        options = {
            "batch_size": 8, "learning_rate": 1e-3, "max_steps": 16, "save_every": 4,
            "train_on_what": "last_assistant_message",
        }  # fmt: skip
        for log in ("whole", "killed"):
            self.begin_at(log, state)
        self.run("sl_loop", "whole", log_path="whole", **options)
        process = self.start("sl_loop", log_path="killed", **options)
        while process.poll() is None and self._steps("killed") < 7:
            time.sleep(0.01)
        self._server.kill()
        process.kill()
        process.wait()
        done = self._steps("killed")
        _check(7 <= done < 16, f"the server was killed after {done} steps, not in mid-run")
        self._server.start()
        rows = self.run("sl_loop", "killed", log_path="killed", **options)
        again = [row["step"] for row in rows[done:]]
        _check(again == list(range(again[0], 16)), f"steps after the restart: {again}")
        whole, killed = (self.weights(self.last_state(log)) for log in ("whole", "killed"))
        _check(whole.keys() == killed.keys(), f"tensors {sorted(whole.keys() ^ killed.keys())} are in one run only")
        distance = max(float(np.abs(whole[name] - killed[name]).max()) for name in whole)
        began = self.weights(state)
        _check(any((whole[name] != began[name]).any() for name in whole), "the run has trained nothing")
        _check(distance < 1e-5, f"weights and state differ by {distance:.1e}")
        return f"killed after step {done - 1}, went on at {again[0]}; largest difference {distance:.1e}"

    def _steps(self, log: str) -> int:
        found = list((self._directory / log).glob("metrics.jsonl"))
        return found[0].read_text(encoding="utf-8").count("\n") if found else 0


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise MissedError(otherwise)


def _ends(rows: Rows, name: str, share: float) -> tuple[float, float]:
    """The mean of the first values of a metric, a share of all, and that of the last ones."""
    values = [row[name] for row in rows if name in row]
    _check(len(values) > 1, f"no metric {name}; there are {sorted({key for row in rows for key in row})}")
    count = max(1, int(len(values) * share))
    return float(np.mean(values[:count])), float(np.mean(values[-count:]))


def _falls(rows: Rows, name: str, *, to: float) -> str:
    first, last = _ends(rows, name, 0.1)
    _check(last < min(first, to), f"{name} {first:.3f} to {last:.3f}, must fall below {to}")
    return f"{name} {first:.3f} to {last:.3f}"


def _rises(rows: Rows, name: str, *, by: float) -> str:
    first, last = _ends(rows, name, 0.25)  # rewards are noisy
    _check(last > first + by, f"{name} {first:.3f} to {last:.3f}, must rise by {by}")
    return f"{name} {first:.3f} to {last:.3f}"


def _recipes(recipes: Recipes) -> Mapping[str, Callable[[], str]]:
    return {
        "sl_loop": recipes.supervised,
        "rl_loop": recipes.loop_of_rewards,
        "math_rl": recipes.groups,
        "dpo": recipes.preferences,
        "vlm_classifier": recipes.images,
        "resume": recipes.resume,
    }


def run_all(directory: Path, names: list[str], *, quick: bool) -> int:
    tiny_qwen3_vl(directory / _MODEL)
    failures = 0
    with serving(directory, ["--model", _MODEL], _environment()) as server:
        recipes = _recipes(Recipes(directory, server, quick=quick))
        for name in names or recipes:
            started = time.monotonic()
            try:
                found = recipes[name]()
            except MissedError as error:
                found, failures = f"MISSED: {error}", failures + 1
            print(f"{name:15} {time.monotonic() - started:6.0f} s  {found}", flush=True)
    return min(failures, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, lower marks")
    parser.add_argument("--out", type=Path, help="an empty directory that keeps all files")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="which; default: all of them")
    options = parser.parse_args()
    tinker_environment.prepare()
    torch.set_num_threads(1)  # threads that wait for each other on busy cores cost more than they save
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.out or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        return run_all(directory, options.recipes, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
