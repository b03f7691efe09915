"""The rollout process of the demonstration: engine, episodes, file, measurements. Training runs in another process."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from renderers import TemplateRenderer, load_renderer
from rollouts.demo.curriculum import Curriculum
from rollouts.demo.digits import DigitsEnvironment, DigitSet, load_digit_sets
from rollouts.demo.full_step_bytes import full_step_bytes
from rollouts.demo.messages import Learn, WarmStart
from rollouts.demo.output_directory import episodes_file, remove_earlier_episodes
from rollouts.demo.progress import Progress
from rollouts.demo.recipe import ATTENTION, TARGETS, Recipe
from rollouts.demo.trainer_process import TrainerProcess
from rollouts.engines.local import LocalEngine
from rollouts.engines.protocol import Engine, SamplingParams
from rollouts.episodes.episode import EpisodeSpec, derived_seed
from rollouts.episodes.runner import run_episodes
from rollouts.testing import tiny_qwen3_vl
from rollouts.trajectory.tree import Trajectory
from transport import RecordWriter


class Policy(Engine, Protocol):
    """An engine whose weights can be replaced, by parameter name."""

    async def update_weights(self, weights: Mapping[str, np.ndarray], version: str) -> None: ...


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
        return max((step.max_mismatch for step in self.steps), default=float("nan"))

    @property
    def stale_mismatches(self) -> list[float]:
        """The `stale_mismatch` of each step that measured it."""
        return [step.stale_mismatch for step in self.steps if step.stale_mismatch is not None]

    @property
    def mean_mismatch(self) -> float:
        return sum(step.mean_mismatch for step in self.steps) / max(1, len(self.steps))

    def missed_targets(self) -> list[str]:
        """Return a description of each missed target; empty if all are met."""
        lift = self.after.accuracy - self.before.accuracy
        after, target = self.after.accuracy, self.recipe.target_accuracy
        blank, worst = self.blank.accuracy, self.max_mismatch
        checks = [
            (after >= target, f"held-out accuracy {after:.3f} is below {target}"),
            (lift >= TARGETS.lift, f"RL lifted accuracy by {lift:.3f}, less than {TARGETS.lift}"),
            (TARGETS.blank_low <= blank <= TARGETS.blank_high, f"blanked images score {blank:.3f}, not chance"),
            (worst < TARGETS.max_mismatch, f"max mismatch {worst:.2e} is not below {TARGETS.max_mismatch}"),
            (self.peak_memory_gb < TARGETS.max_memory_gb, f"peak memory {self.peak_memory_gb:.2f} GB"),
        ]
        return [description for met, description in checks if not met]

    def save(self, path: Path) -> None:
        summary = {"max_mismatch": self.max_mismatch, "mean_mismatch": self.mean_mismatch}
        path.write_text(json.dumps({**asdict(self), **summary, "missed": self.missed_targets()}, indent=2) + "\n")


class Demo:
    """One run of the demonstration, from random weights to the results."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        seed: int,
        model_directory: Path,
        engine: Policy,
        trainer: TrainerProcess,
        writer: RecordWriter,
        progress: Progress,
    ) -> None:
        self.recipe, self.seed = recipe, seed
        self.engine, self.trainer, self.writer, self.progress = engine, trainer, writer, progress
        self.renderer: TemplateRenderer = load_renderer(model_directory)
        self.train_digits, held_out = load_digit_sets()
        self.held_out_digits = held_out.take(range(min(recipe.held_out_digits, len(held_out))))
        self.sampling = SamplingParams(max_tokens=recipe.max_tokens)
        self.results = Results(seed=seed, recipe=recipe)
        self._curriculum = Curriculum(len(self.train_digits), kept_solved=recipe.kept_solved, seed=seed)
        self._seen_images: set[str] = set()

    async def run(self) -> Results:
        try:
            await self._warm_start()
            self.results.before = await self._score(self.held_out_digits)
            for step in range(self.recipe.rl_steps):
                await self._learn(step)
                last = step + 1 == self.recipe.rl_steps
                if last or (step + 1) % self.recipe.evaluate_every == 0:
                    score = await self._score(self.held_out_digits)
                    self.results.held_out[step + 1] = score.accuracy
                    self.progress.print_evaluation(step + 1, score.accuracy)
                    self.results.after = score
            self.results.blank = await self._score(self.held_out_digits, blank=True)
        finally:
            await self.engine.close()
        stats = self.renderer.bridge_stats
        self.results.bridged, self.results.bridge_refused = stats.bridged, stats.refused.total()
        return self.results

    async def _warm_start(self) -> None:
        """Make supervised steps until the sampled answers to unseen training digits reach `sft_target`."""
        first = self.recipe.labelled
        probe = self.train_digits.take(range(first, first + self.recipe.probe_digits))
        while self.results.warm_steps < self.recipe.sft_max_steps:
            steps = self.recipe.sft_chunk if self.results.warm_steps else self.recipe.sft_first_check
            learned, _ = await self.trainer.request(WarmStart(steps))
            self.results.warm_steps += steps
            await self.engine.update_weights(learned.weights, f"warm-{self.results.warm_steps}")
            score = await self._score(probe, max_turns=1)
            self.progress.update_warm_start(self.results.warm_steps, learned.loss, score.accuracy)
            if score.accuracy >= self.recipe.sft_target:
                return

    async def _learn(self, step: int) -> None:
        started = time.perf_counter()
        digits = self._curriculum.next(self.recipe.groups)
        trajectories = await self._run_episodes(self.train_digits, self._specs(step, digits))
        right = np.array([_right_at_once(t) for t in trajectories]).reshape(len(digits), self.recipe.group_size)
        self._curriculum.record_results(digits, np.all(right, axis=1))
        # The local engine gets new weights at once, so there is no stale mismatch to measure.
        request = Learn(trajectories, step / self.recipe.rl_steps, not isinstance(self.engine, LocalEngine))
        learning = asyncio.create_task(self.trainer.request(request))
        await asyncio.sleep(0)  # the request is sent; the file is written while the other process trains
        for trajectory in trajectories:
            self.writer.append(trajectory)
        learned, sent = await learning
        await self.engine.update_weights(learned.weights, f"rl-{step + 1}")
        self._count(trajectories, sent)
        mismatch = learned.mismatch
        row = Step(
            step=step + 1,
            train_accuracy=float(right.mean()),
            train_reward=_mean([t.reward for t in trajectories]),
            loss=learned.loss,
            max_mismatch=mismatch.max_abs,
            mean_mismatch=mismatch.mean_abs,
            kl=mismatch.kl,
            seconds=time.perf_counter() - started,
            stale_mismatch=learned.mismatch_after.max_abs if learned.mismatch_after.tokens else None,
        )
        self.results.steps.append(row)
        self.progress.update_rl(row.step, row.train_accuracy, row.train_reward, row.max_mismatch, row.seconds)

    def _specs(self, step: int, digits: np.ndarray) -> list[EpisodeSpec]:
        """Return the episodes of an RL step: a group for each digit."""
        members = range(self.recipe.group_size)
        return [
            EpisodeSpec(
                seed=int(digit),
                sampling_seed=derived_seed(self.seed, "rl", step, group, member),
                group_id=f"{step}-{group}",
                episode_id=f"{step}-{group}-{member}",
            )
            for group, digit in enumerate(digits)
            for member in members
        ]

    async def _score(self, digits: DigitSet, *, max_turns: int = 2, blank: bool = False) -> Score:
        specs = [EpisodeSpec(index, derived_seed(self.seed, "score", index)) for index in range(len(digits))]
        trajectories = await self._run_episodes(digits, specs, max_turns=max_turns, blank=blank)
        return Score(_mean([_right_at_once(t) for t in trajectories]), _mean([t.reward for t in trajectories]))

    async def _run_episodes(
        self, digits: DigitSet, specs: Sequence[EpisodeSpec], *, max_turns: int = 2, blank: bool = False
    ) -> list[Trajectory]:
        return await run_episodes(
            lambda: DigitsEnvironment(digits, blank=blank),
            specs,
            engine=self.engine,
            renderer=self.renderer,
            sampling=self.sampling,
            max_turns=max_turns,
            on_error="raise",
        )

    def _count(self, trajectories: Sequence[Trajectory], sent: int) -> None:
        results = self.results
        results.episodes += len(trajectories)
        results.turns += sum(t.num_turns for t in trajectories)
        results.tokens += sum(len(node) for t in trajectories for node in t.nodes)
        results.sampled_tokens += sum(len(node.logprobs) for t in trajectories for node in t.nodes)
        references = [reference for t in trajectories for reference in t.all_media()]
        results.images += len(references)
        self._seen_images.update(reference.mm_hash for reference in references)
        results.distinct_images = len(self._seen_images)
        results.wire_bytes += sent
        results.full_step_bytes += full_step_bytes(trajectories, self.renderer.processors["image"])


def local_policy(model_directory: Path) -> Policy:
    """Return a policy in this process."""
    return LocalEngine.from_pretrained(model_directory, attn_implementation=ATTENTION)


def run_demo(
    *,
    recipe: Recipe,
    seed: int,
    out: Path,
    trainer: TrainerProcess,
    progress: Progress,
    make_policy: Callable[[Path], Policy] = local_policy,
) -> Results:
    """Run the demonstration. It writes `model/` and `trajectories.mmr` to `out`.

    `trainer` reads the model directory `out / "model"`, which is written here; `make_policy` gets the same path. After
    Ctrl-C it raises `KeyboardInterrupt`; the file then holds all finished episodes.
    """
    out.mkdir(parents=True, exist_ok=True)
    episodes = episodes_file(out)
    remove_earlier_episodes(out)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(trainer.threads)
    model_directory = tiny_qwen3_vl(out / "model", seed)
    with RecordWriter(episodes) as writer:
        demo = Demo(
            recipe=recipe,
            seed=seed,
            model_directory=model_directory,
            engine=make_policy(model_directory),
            trainer=trainer,
            writer=writer,
            progress=progress,
        )
        results = asyncio.run(demo.run())
    trainer.stop()
    results.file_bytes = episodes.stat().st_size
    results.peak_memory_gb = _peak_memory_gb()
    return results


def _right_at_once(trajectory: Trajectory) -> bool:
    return bool(trajectory.turns[0].info["right"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _peak_memory_gb() -> float:
    """Peak resident memory of this process plus that of the largest finished child."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(peaks) * unit / 2**30
