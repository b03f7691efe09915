"""The trainer of the demonstration, which receives episodes only as decoded bytes, and its policy on a server."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForImageTextToText

from renderers import Message, build_training_sample, load_renderer
from rollouts.demo.recipe import ATTENTION, Recipe
from rollouts.demo.task import DigitsEnvironment, Learn, Learned, WarmStart, load_digit_sets
from rollouts.engines.protocol import InFlight, SendTensors
from rollouts.engines.vllm import VLLMEngine, write_tied_head
from rollouts.models.loading import without_progress_bars
from rollouts.training import (
    MismatchReport,
    TrainingBatch,
    TrainingSample,
    group_advantages,
    merge_reports,
    micro_batches,
    mismatch_report,
    policy_gradient_loss,
    sample_from_rendered,
    samples_from_trajectory,
    sft_loss,
    token_logprobs,
)
from rollouts.trajectory.tree import Trajectory


class Trainer:
    """The model, its optimizer, and the renderer that derives pixels from media sources."""

    def __init__(self, model_directory: Path, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        self.renderer = load_renderer(model_directory)
        with without_progress_bars():
            self.model = AutoModelForImageTextToText.from_pretrained(
                model_directory, dtype=torch.float32, attn_implementation=ATTENTION
            )
        self.pad_id = int(self.model.config.text_config.pad_token_id)
        self.optimizer = self._new_optimizer()
        self._updates = 0
        self._learning_from_rewards = False
        self._order = np.random.default_rng(seed)
        self._labelled = self._labelled_samples()
        self._queue = np.empty(0, dtype=np.int64)  # labelled digits not used in this pass yet

    def handle(self, request: object) -> Learned:
        if isinstance(request, WarmStart):
            return self._warm_start(request.steps)
        assert isinstance(request, Learn)
        return self._learn(request)

    # Supervised.

    def _labelled_samples(self) -> list[TrainingSample]:
        """Two conversations a digit: the correct answer, which is trained, alone and behind a wrong one."""
        digits, _ = load_digit_sets()
        environment = DigitsEnvironment(digits)
        samples = []
        for index in range(self.recipe.labelled):
            opening = environment.reset(index)
            right = environment.answer()
            wrong = str((int(right) + self._order.integers(1, 10)) % 10)
            again = environment.step({"role": "assistant", "content": wrong}).messages
            correct: Message = {"role": "assistant", "content": right}
            corrected: list[Message] = [*opening, {"role": "assistant", "content": wrong}, *again, correct]
            for conversation in ([*opening, correct], corrected):
                mask = [message is correct for message in conversation]
                built = build_training_sample(self.renderer, conversation, message_loss_mask=mask)
                samples.append(sample_from_rendered(built, name=f"labelled-{index}"))
        return samples

    def _warm_start(self, steps: int) -> Learned:
        total = 0.0
        for _ in range(steps):
            if len(self._queue) < self.recipe.sft_batch:
                self._queue = self._order.permutation(self.recipe.labelled)
            digits, self._queue = np.split(self._queue, [self.recipe.sft_batch])
            # Seven in ten conversations have the correct answer first.
            rows = 2 * digits + (self._order.random(len(digits)) < 0.3)
            batch = TrainingBatch.from_samples([self._labelled[row] for row in rows], pad_id=self.pad_id)
            loss = sft_loss(token_logprobs(self.model, batch), batch.loss_mask, normaliser=len(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            self._update(self.recipe.sft_learning_rate * min(1, (self._updates + 1) / self.recipe.sft_warmup))
            total += float(loss.detach())
        return Learned(self._weights(), total / steps)

    # From rewards.

    def _learn(self, request: Learn) -> Learned:
        """Make `epochs` optimizer steps on all episodes; the first passes also measure the mismatch."""
        if not self._learning_from_rewards:
            self._learning_from_rewards, self._updates, self.optimizer = True, 0, self._new_optimizer()
        trajectories = request.trajectories
        samples = self._samples(trajectories)
        with_gradient = self._micro_batches([sample for sample in samples if sample.advantages.any()])
        # A group with equal rewards has no gradient; its mismatch is measured all the same.
        without_gradient = self._micro_batches([sample for sample in samples if not sample.advantages.any()])
        reports: list[MismatchReport] = []
        with torch.no_grad():
            reports += [mismatch_report(batch, token_logprobs(self.model, batch)) for batch in without_gradient]
        total = 0.0
        for epoch in range(self.recipe.epochs):
            for batch in with_gradient:
                logprobs = token_logprobs(self.model, batch)
                if epoch == 0:
                    reports.append(mismatch_report(batch, logprobs))
                loss = policy_gradient_loss(
                    logprobs, batch.logprobs, batch.advantages, batch.loss_mask, normaliser=len(trajectories)
                ).loss
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            warmup = min(1, (self._updates + 1) / self.recipe.rl_warmup)
            decay = 1 - (1 - self.recipe.final_rate) * request.progress
            self._update(self.recipe.rl_learning_rate * warmup * decay)
        after = []
        if request.measure_after:
            with torch.no_grad():
                after = [mismatch_report(batch, token_logprobs(self.model, batch)) for batch in with_gradient[:1]]
        return Learned(self._weights(), total / self.recipe.epochs, merge_reports(reports), merge_reports(after))

    def _samples(self, trajectories: list[Trajectory]) -> list[TrainingSample]:
        rewards, groups = [t.reward for t in trajectories], [t.group_id for t in trajectories]
        advantages = group_advantages(rewards, groups, scale="batch")
        processors = self.renderer.processors
        return [
            sample
            for trajectory, advantage in zip(trajectories, advantages, strict=True)
            for sample in samples_from_trajectory(trajectory, advantage=float(advantage), processors=processors)
        ]

    def _micro_batches(self, samples: list[TrainingSample]) -> list[TrainingBatch]:
        """Group rows by length, because padding costs as much as tokens, and by image, because a micro-batch
        encodes an image once."""
        rows = sorted(samples, key=lambda sample: (len(sample), [item.mm_hash for item, _ in sample.media]))
        return list(micro_batches(rows, rows=self.recipe.micro_batch, pad_id=self.pad_id, stretch=1.2))

    # Optimizing.

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def _update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_gradient)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._updates += 1

    def _weights(self) -> dict[str, np.ndarray]:
        return {name: parameter.detach().numpy() for name, parameter in self.model.named_parameters()}


# The policy of the demonstration on a vLLM server. Weights are sent as checkpoints in the file system.


class ServerPolicy(VLLMEngine):
    """An engine with replaceable weights, on a server that reads the same file system.

    The weights of the last two updates lie beside `model_directory`. The files that the server has loaded are
    never overwritten: the server loads them again if the new weights cannot be loaded.
    """

    def __init__(self, base_url: str, api_key: str | None, model_directory: Path) -> None:
        super().__init__(base_url, api_key=api_key)
        directory = model_directory.parent / "served-weights"
        self._loaded, self._spare = directory / "a", directory / "b"

    async def update_weights(
        self,
        weights: Mapping[str, np.ndarray] | str | os.PathLike[str] | SendTensors,
        version: str,
        *,
        in_flight: InFlight = "abort",
    ) -> None:
        """Make the server load float32 weights by parameter name, which are written first, or a directory."""
        if not isinstance(weights, Mapping):
            await super().update_weights(weights, version, in_flight=in_flight)
            return
        self._spare.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(weight) for name, weight in weights.items()}
        save_file(arrays, self._spare / "model.safetensors", metadata={"format": "pt"})
        (self._spare / "lm_head.safetensors").unlink(missing_ok=True)  # left by the previous update
        write_tied_head(self._spare)
        await super().update_weights(self._spare.resolve(), version, in_flight=in_flight)
        self._loaded, self._spare = self._spare, self._loaded


def serve_command(model_directory: Path) -> str:
    """Return a shell command that starts a server for the demonstration."""
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(str(model_directory))} --host 127.0.0.1 --dtype float32 "
        "--max-model-len 4096 --enforce-eager --enable-scale-out"
    )
