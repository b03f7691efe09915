"""What a step of `rollouts train` costs beside its runner and its trainer: 4,096 episodes a step, an instant engine.

    OMP_NUM_THREADS=1 python benchmarks/train.py [--groups 512] [--steps 3]

The engine answers every request at once with the same three tokens; everything else is that of the command, the files
included. Prints the seconds of a step in each part; "the loop" is what is in none of the others.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.demo import digits
from rollouts.engines.protocol import Completion, Engine, FinishReason, GenerateResult, WeightSpan
from rollouts.run_config.group_files import GroupFiles
from rollouts.runner import Runner
from rollouts.testing import tiny_qwen3_vl
from rollouts.train import learning
from rollouts.train.learning import Learner
from rollouts.train.policy import Policy
from rollouts.training.trainer import Trainer

SECONDS: Counter[str] = Counter()


class InstantEngine(Engine):
    """Answers with the same tokens, under the version that it was told last."""

    def __init__(self, version: str) -> None:
        self._version = version

    @property
    def weight_version(self) -> str:
        return self._version

    async def generate(self, request, listen=None):
        ids, logprobs = np.array([65, 66, 67], np.int32), np.full(3, -1.0, np.float32)
        spans = (WeightSpan(self._version, 0, 3),)
        return GenerateResult(
            request.request_id, [Completion(0, ids, logprobs, FinishReason.LENGTH, weight_spans=spans)]
        )

    async def update_weights(self, weights, version, *, in_flight="abort"):
        self._version = version

    async def close(self):
        pass


def timed(owner, name, part):
    """Add the seconds of a method to a part; those of the parts that it calls are not counted twice."""
    original = getattr(owner, name)

    def wrapper(*arguments, **options):
        started, inside = time.perf_counter(), SECONDS.total()
        result = original(*arguments, **options)
        SECONDS[part] += time.perf_counter() - started - (SECONDS.total() - inside)
        return result

    async def waiting(*arguments, **options):
        started = time.perf_counter()
        result = await original(*arguments, **options)
        SECONDS[part] += time.perf_counter() - started
        return result

    setattr(owner, name, waiting if part == "runner" else wrapper)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=512, help="of 8 episodes each")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    async def engines(policy: Policy, step: int) -> list[Engine]:
        return [InstantEngine(policy.version(step))]

    Policy.engines = engines
    timed(Runner, "collect", "runner")
    for name in ("forward_backward", "forward", "optim_step"):
        timed(Trainer, name, "trainer")
    timed(learning, "samples_from_trajectory", "samples")
    timed(learning, "mismatch_report", "mismatch")
    timed(GroupFiles, "write_all", "files, beside the trainer")
    timed(Learner, "learn", "the loop")
    project = Path(digits.__file__)
    with tempfile.TemporaryDirectory() as directory:
        tiny_qwen3_vl(Path(directory, "model"))
        Path(directory, "digits.py").write_text(project.read_text("utf-8"))
        text = project.with_name("train.toml").read_text("utf-8")
        text = text[: text.index("[supervised]")] + text[text.index("[train]") :]
        Path(directory, "train.toml").write_text(text)
        changes = [f"train.groups={options.groups}", f"train.steps={options.steps}", "group_size=8", "train.epochs=1"]
        changes += ["concurrency=4096", "train.max_mismatch=1000.0", "output.report=false", "train.minibatches=1"]
        changes += ["environment.arguments.blank=false", "train.loss=dro", "train.loss_options.beta=1.0"]
        arguments = [part for change in changes for part in ("--set", change)]
        result = CliRunner().invoke(app, ["train", f"{directory}/train.toml", *arguments])
        assert result.exit_code == 0, result.output
    for part, seconds in SECONDS.most_common():
        print(f"{part:28} {seconds / options.steps:8.3f} s a step")
    share = SECONDS["the loop"] / (SECONDS["runner"] + SECONDS["trainer"])
    print(f"the loop is {share:.1%} of runner and trainer")


if __name__ == "__main__":
    main()
