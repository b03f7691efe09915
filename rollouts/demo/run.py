"""The rollout process of the demonstration: engine, episodes, file, measurements. Training runs in another process."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import msgpack
import numpy as np
import torch
from rich.console import Console

from renderers import load_renderer
from renderers.vision.processor import MediaProcessor
from rollouts.demo.process import TrainerProcess, episodes_file, remove_earlier_episodes
from rollouts.demo.recipe import ATTENTION, TARGETS, Recipe
from rollouts.demo.task import (
    Curriculum,
    DigitsEnvironment,
    DigitSet,
    Learn,
    WarmStart,
    load_digit_sets,
)
from rollouts.engines.local import LocalEngine
from rollouts.engines.protocol import Engine, SamplingParams
from rollouts.engines.vllm import VLLMEngine
from rollouts.episodes.episode import EpisodeSpec, run_episodes
from rollouts.episodes.turns import derived_seed
from rollouts.files import replaced_file
from rollouts.observability import TrainingLog
from rollouts.terminal.table import Column, print_table
from rollouts.testing import tiny_qwen3_vl
from rollouts.trajectory.tree import Trajectory
from transport import RecordWriter


class Progress:
    """Prints a line for the steps of the warm start, every fifth step of RL, and each evaluation."""

    def __init__(self, console: Console, recipe: Recipe) -> None:
        self._console, self._recipe = console, recipe
        self._rl_seconds = 0.0

    def update_warm_start(self, steps: int, loss: float, accuracy: float) -> None:
        figures = f"loss {loss:.3f}  accuracy {accuracy:.2f} (ends at {self._recipe.sft_target})"
        self._print(f"warm start {steps}/{self._recipe.sft_max_steps}: {figures}")

    def update_rl(self, step: int, accuracy: float, reward: float, mismatch: float, seconds: float) -> None:
        total = self._recipe.rl_steps
        self._rl_seconds += seconds
        left = round(self._rl_seconds / step * (total - step))
        if step in (1, total) or step % 5 == 0:
            self._print(
                f"step {step}/{total}: {left // 60}:{left % 60:02} left  accuracy {accuracy:.3f}  "
                f"mismatch {mismatch:.0e}  reward {reward:.3f}  {seconds:.1f} s/step"
            )

    def print_evaluation(self, step: int, accuracy: float) -> None:
        self._print(f"step {step}/{self._recipe.rl_steps}: held-out first-try accuracy {accuracy:.3f}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Score:
    """One episode for each held-out digit: share of correct first answers, and mean reward."""

    accuracy: float
    reward: float


@dataclass(frozen=True, slots=True)
class Step:
    """One RL step. `stale_mismatch`: largest mismatch between the step's episodes and the weights after the step."""

    step: int
    train_accuracy: float
    train_reward: float
    loss: float
    max_mismatch: float
    mean_mismatch: float
    kl: float
    seconds: float
    stale_mismatch: float | None = None


@dataclass(slots=True)
class Results:
    """All measurements of the demonstration. Byte counts cover the RL phase."""

    seed: int
    recipe: Recipe
    before: Score = Score(0, 0)
    after: Score = Score(0, 0)
    blank: Score = Score(0, 0)
    warm_steps: int = 0
    steps: list[Step] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    episodes: int = 0
    turns: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    images: int = 0
    distinct_images: int = 0
    bridged: int = 0
    bridge_refused: int = 0
    wire_bytes: int = 0
    full_step_bytes: int = 0
    file_bytes: int = 0
    seconds: float = 0.0
    peak_memory_gb: float = 0.0

    @property
    def max_mismatch(self) -> float:
        return max(step.max_mismatch for step in self.steps)

    @property
    def stale_mismatches(self) -> list[float]:
        """The `stale_mismatch` of each step that measured it."""
        return [step.stale_mismatch for step in self.steps if step.stale_mismatch is not None]

    @property
    def mean_mismatch(self) -> float:
        return fmean(step.mean_mismatch for step in self.steps)

    def missed_targets(self) -> list[str]:
        """Return a description of each missed target; empty if all are met."""
        lift = self.after.accuracy - self.before.accuracy
        after, target = self.after.accuracy, self.recipe.target_accuracy
        blank, worst = self.blank.accuracy, self.max_mismatch
        checks = [
            (after >= target, f"held-out accuracy {after:.3f} is below {target}"),
            (lift >= TARGETS.lift, f"RL lifted accuracy by {lift:.3f}, less than {TARGETS.lift}"),
            (blank <= TARGETS.blank, f"blanked images score {blank:.3f}, above {TARGETS.blank}"),
            (worst < TARGETS.max_mismatch, f"max mismatch {worst:.2e} is not below {TARGETS.max_mismatch}"),
            (self.peak_memory_gb < TARGETS.max_memory_gb, f"peak memory {self.peak_memory_gb:.2f} GB"),
        ]
        return [description for met, description in checks if not met]

    def save(self, path: Path) -> None:
        summary = {"max_mismatch": self.max_mismatch, "mean_mismatch": self.mean_mismatch}
        text = json.dumps({**asdict(self), **summary, "missed": self.missed_targets()}, indent=2) + "\n"
        with replaced_file(path) as file:
            file.write(text.encode())


#: Makes a policy in this process.
local_policy = partial(LocalEngine.from_pretrained, attn_implementation=ATTENTION)


class Demo:
    """The demonstration, from random weights to the results. It writes `model/` and `trajectories.mmr` to `out`.

    `trainer` reads the model directory `out / "model"`, which is written here; `make_policy` gets the same
    path.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        seed: int,
        out: Path,
        trainer: TrainerProcess,
        progress: Progress,
        make_policy: Callable[[Path], Engine] = local_policy,
    ) -> None:
        remove_earlier_episodes(out)
        torch.set_num_threads(1)  # on busy cores a tiny model is many times slower with two
        model_directory = tiny_qwen3_vl(out / "model", seed)
        self._recipe, self._seed, self._trainer, self._progress = recipe, seed, trainer, progress
        self._out = out
        self._episodes_file = episodes_file(out)
        self._version = ""  # of the weights that sample
        self._engine = make_policy(model_directory)
        self._renderer = load_renderer(model_directory)
        self._train_digits, held_out = load_digit_sets()
        self._held_out_digits = held_out.take(range(min(recipe.held_out_digits, len(held_out))))
        self._results = Results(seed=seed, recipe=recipe)
        self._curriculum = Curriculum(len(self._train_digits), kept_solved=recipe.kept_solved, seed=seed)
        self._seen_images: set[str] = set()

    def run(self) -> Results:
        """Run it. After Ctrl-C it raises `KeyboardInterrupt`; the file then holds all finished episodes."""
        results = self._results
        with RecordWriter(self._episodes_file) as writer, TrainingLog(self._out) as log:
            asyncio.run(self._run(writer, log))
        self._trainer.stop()
        bridging = self._renderer.bridge_stats
        results.bridged, results.bridge_refused = bridging.bridged, bridging.refused.total()
        results.file_bytes = self._episodes_file.stat().st_size
        results.peak_memory_gb = _peak_memory_gb()
        return results

    async def _run(self, writer: RecordWriter, log: TrainingLog) -> None:
        results, recipe = self._results, self._recipe
        try:
            if isinstance(self._engine, VLLMEngine):  # a minute of training would precede the first request
                await self._engine.capabilities()
            await self._warm_start()
            results.before = await self._score(self._held_out_digits)
            for step in range(1, recipe.rl_steps + 1):
                await self._learn(step, writer, log)
                if step == recipe.rl_steps or step % recipe.evaluate_every == 0:
                    results.after = await self._score(self._held_out_digits)
                    results.held_out[step] = results.after.accuracy
                    self._progress.print_evaluation(step, results.after.accuracy)
                    held_out = {"held_out_accuracy": results.after.accuracy, "held_out_reward": results.after.reward}
                    log.write(step, held_out)
            results.blank = await self._score(self._held_out_digits, blank=True)
        finally:
            await self._engine.close()

    async def _warm_start(self) -> None:
        """Make supervised steps until the sampled answers to unseen training digits reach `sft_target`."""
        first = self._recipe.labelled
        probe = self._train_digits.take(range(first, first + self._recipe.probe_digits))
        while self._results.warm_steps < self._recipe.sft_max_steps:
            steps = self._recipe.sft_chunk if self._results.warm_steps else self._recipe.sft_first_check
            learned, _ = await self._trainer.request(WarmStart(steps))
            self._results.warm_steps += steps
            await self._update_weights(learned.weights, f"warm-{self._results.warm_steps}")
            score = await self._score(probe, max_turns=1)
            self._progress.update_warm_start(self._results.warm_steps, learned.loss, score.accuracy)
            if score.accuracy >= self._recipe.sft_target:
                return

    async def _learn(self, step: int, writer: RecordWriter, log: TrainingLog) -> None:
        started = time.perf_counter()
        digits = self._curriculum.next(self._recipe.groups)
        specs = [
            EpisodeSpec(
                seed=int(digit),
                sampling_seed=derived_seed(self._seed, "rl", step - 1, group, member),
                group_id=f"{step - 1}-{group}",
                episode_id=f"{step - 1}-{group}-{member}",
            )
            for group, digit in enumerate(digits)
            for member in range(self._recipe.group_size)
        ]
        trajectories = await self._run_episodes(self._train_digits, specs)
        right = np.array([_right_at_once(t) for t in trajectories]).reshape(len(digits), self._recipe.group_size)
        self._curriculum.record_results(digits, np.all(right, axis=1))
        # The local engine gets new weights at once, so there is no stale mismatch to measure.
        request = Learn(trajectories, (step - 1) / self._recipe.rl_steps, not isinstance(self._engine, LocalEngine))
        learning = asyncio.create_task(self._trainer.request(request))
        await asyncio.sleep(0)  # the request is sent; the file is written while the other process trains
        for trajectory in trajectories:
            writer.append(trajectory)
        learned, sent = await learning
        mismatch = replace(learned.mismatch, trainer_version=self._version)
        await self._update_weights(learned.weights, f"rl-{step}")
        self._count(trajectories, sent)
        row = Step(
            step=step,
            train_accuracy=float(right.mean()),
            train_reward=fmean(t.reward for t in trajectories),
            loss=learned.loss,
            max_mismatch=mismatch.max_abs,
            mean_mismatch=mismatch.mean_abs,
            kl=mismatch.statistics.k3,
            seconds=time.perf_counter() - started,
            stale_mismatch=learned.mismatch_after.max_abs if learned.mismatch_after.tokens else None,
        )
        self._results.steps.append(row)
        figures = {"accuracy": row.train_accuracy, "reward": row.train_reward, "loss": row.loss, "seconds": row.seconds}
        log.write(step, figures, mismatch=mismatch)
        self._progress.update_rl(row.step, row.train_accuracy, row.train_reward, row.max_mismatch, row.seconds)

    async def _update_weights(self, weights: Mapping[str, np.ndarray], version: str) -> None:
        await self._engine.update_weights(weights, version)
        self._version = version

    async def _score(self, digits: DigitSet, *, max_turns: int = 2, blank: bool = False) -> Score:
        specs = [EpisodeSpec(index, derived_seed(self._seed, "score", index)) for index in range(len(digits))]
        trajectories = await self._run_episodes(digits, specs, max_turns=max_turns, blank=blank)
        return Score(fmean(_right_at_once(t) for t in trajectories), fmean(t.reward for t in trajectories))

    async def _run_episodes(
        self, digits: DigitSet, specs: Sequence[EpisodeSpec], *, max_turns: int = 2, blank: bool = False
    ) -> list[Trajectory]:
        return await run_episodes(
            lambda: DigitsEnvironment(digits, blank=blank),
            specs,
            engine=self._engine,
            renderer=self._renderer,
            sampling=SamplingParams(max_tokens=self._recipe.max_tokens),
            max_turns=max_turns,
            on_error="raise",
        )

    def _count(self, trajectories: Sequence[Trajectory], sent: int) -> None:
        results = self._results
        results.episodes += len(trajectories)
        results.turns += sum(t.num_turns for t in trajectories)
        results.tokens += sum(len(node) for t in trajectories for node in t.nodes)
        results.sampled_tokens += sum(len(node.logprobs) for t in trajectories for node in t.nodes)
        results.images += sum(t.media_counts()["images"] for t in trajectories)
        self._seen_images.update(reference.source.digest for t in trajectories for reference in t.all_media())
        results.distinct_images = len(self._seen_images)
        results.wire_bytes += sent
        results.full_step_bytes += full_step_bytes(trajectories, self._renderer.processors["image"])


def _right_at_once(trajectory: Trajectory) -> bool:
    return bool(trajectory.turns[0].info["right"])


def full_step_bytes(trajectories: Sequence[Trajectory], processor: MediaProcessor) -> int:
    """Return the bytes of the same episodes in the common form in which each step holds its whole history.

    A step is its prompt and completion as msgpack lists, log-probabilities as floats, and float32 pixels of
    all images up to the step.
    """
    total = 0
    for trajectory in trajectories:
        for turn in trajectory.turns:
            ids, logprobs = trajectory.token_ids(turn.node), trajectory.nodes[turn.node].logprobs
            total += len(msgpack.packb([ids.tolist(), logprobs.tolist()]))
            for reference in trajectory.media(turn.node):
                item = processor.process(reference.source)
                total += item["pixel_values"].size * np.dtype(np.float32).itemsize + item["image_grid_thw"].nbytes
    return total


def _peak_memory_gb() -> float:
    """Peak resident memory of this process plus that of the largest finished child."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(peaks) * unit / 2**30


def print_results(results: Results, console: Console) -> None:
    """Print a table with a row for each figure: its value before and after RL, and its target."""
    lift = results.after.accuracy - results.before.accuracy
    stale = results.stale_mismatches
    ratio = results.full_step_bytes / max(1, results.wire_bytes)
    before, after, blank = results.before, results.after, results.blank
    empty = ("", "", "", "")
    accuracies = f">= {results.recipe.target_accuracy} and +{TARGETS.lift}"
    size = f"{_megabytes(results.wire_bytes)} / {_megabytes(results.full_step_bytes)} ({ratio:.0f}x)"
    rows = [
        ("held-out first-try accuracy", f"{before.accuracy:.3f}", f"{after.accuracy:.3f} ({lift:+.3f})", accuracies),
        ("held-out mean reward", f"{before.reward:.3f}", f"{after.reward:.3f}", ""),
        ("control: images blanked", "", f"{blank.accuracy:.3f}", f"<= {TARGETS.blank}"),
        empty,
        ("max mismatch (nats)", "", f"{results.max_mismatch:.2e}", f"< {TARGETS.max_mismatch:.0e}, every step"),
        ("mean mismatch (nats)", "", f"{results.mean_mismatch:.2e}", ""),
        *([("max mismatch just before each update", "", f"{min(stale):.2e} to {max(stale):.2e}", "")] if stale else []),
        empty,
        ("episodes / turns", "", f"{results.episodes:,} / {results.turns:,}", ""),
        ("tokens / of them sampled", "", f"{results.tokens:,} / {results.sampled_tokens:,}", ""),
        ("images shown / distinct", "", f"{results.images:,} / {results.distinct_images:,}", ""),
        ("bridged turns / refused", "", f"{results.bridged:,} / {results.bridge_refused:,}", ""),
        ("bytes over the wire / naive form", "", size, ""),
        ("trajectory file", "", _megabytes(results.file_bytes), ""),
        empty,
        ("time", "", f"{results.seconds:.0f} s", ""),
        ("peak memory, both processes", "", f"{results.peak_memory_gb:.2f} GB", f"< {TARGETS.max_memory_gb} GB"),
    ]
    headings = ("before RL", "after RL", "must reach")
    columns = [Column("figure", wraps=True), *(Column(heading, wraps=True) for heading in headings)]
    console.print(f"rollouts demo, seed {results.seed}")
    print_table(columns, rows, console)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
