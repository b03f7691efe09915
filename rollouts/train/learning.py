"""A training step: samples of groups, their mismatch and its limit, gradients, the optimizer."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from renderers import MultiModalData, TemplateRenderer, build_training_samples
from renderers.errors import RendererError
from rollouts.engines.protocol import Engine, GenerateRequest, SamplingParams
from rollouts.episodes.engine_calls import generated
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.observability import TrainingLog
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.sections import SupervisedSection, TrainSection
from rollouts.runner.group import Group
from rollouts.task import Task
from rollouts.train.policy import NAME, Policy
from rollouts.training import (
    MismatchReport,
    TrainingBatch,
    TrainingSample,
    degenerate_groups,
    diagnose_mismatch,
    diagnosis_text,
    group_advantages,
    mismatch_report,
    sample_from_rendered,
    samples_from_trajectory,
    truncate_sample,
)
from rollouts.training.datums import corrected_data
from rollouts.training.named_losses import check_correction, loss_options, named_loss
from rollouts.training.trainer import AdamParams, Datum, LossResult, datum_from_sample

#: Losses with a gradient where all advantages are 0.
_WITHOUT_ADVANTAGES: Final = frozenset({"dro", "reverse_kl", "forward_kl", "jsd"})
#: The base model in the trainer: an adapter that is never trained, and so changes nothing.
_START: Final = "start"
_DEFAULT_MISMATCH: Final = {"float32": 1e-3, "bfloat16": 0.05}
_EXAMINED: Final = 4  # episodes whose mismatch is diagnosed
_COMPARED_TOKENS: Final = 16  # of a completion that `check_engine` samples


class Learner:
    """Takes the training steps of a policy. Raises `RunConfigError` for a loss or numbers that do not exist."""

    def __init__(self, policy: Policy, file: ConfigFile, section: TrainSection) -> None:
        self._policy = policy
        self._trainer = policy.trainer
        self._section = section
        self._limit = section.max_mismatch or _DEFAULT_MISMATCH[section.dtype]
        self._shortest: TrainingSample  # of the last step
        config = file.config
        self._seed, self._supervised, sampling = config.seed, config.supervised, config.sampling
        with file.naming("train"):
            loss = named_loss(section.loss)
            with file.naming("train", "loss_options"):
                self._options = loss_options(section.loss, section.loss_options)
            if section.correction:
                check_correction(section.loss, section.correction)
            if "max_lag" in section.correction:
                raise ArgumentError("correction", section.correction, "pass max_staleness in [mode] for max_lag")
            try:
                given = {"grad_clip_norm": 1.0, **section.adam}
                self._adam = AdamParams(learning_rate=section.learning_rate, **given)
            except TypeError as error:
                raise ArgumentError("adam", section.adam, "pass fields of AdamParams, such as weight_decay") from error
        if any("teacher" in name for name in loss.required) and config.teacher is None:
            raise file.error(("train", "loss"), f"{section.loss!r} compares with a teacher; add [teacher]")
        if loss.has_candidates and config.teacher is not None and not config.teacher.top_k:
            raise file.error(("teacher", "top_k"), f"{section.loss!r} compares likeliest ids; write how many")
        if section.loss in _WITHOUT_ADVANTAGES and getattr(config.mode, "on_stale", "") == "downweight":
            reason = f"the loss {section.loss!r} has a term without advantages, which smaller weights do not reach"
            raise file.error(("mode", "on_stale"), f'{reason}; write "drop", or another train.loss')
        if section.loss not in _WITHOUT_ADVANTAGES and not section.kl:
            reason = "the episodes of a task are compared with each other, and nothing would be learned"
            if config.group_size == 1:
                raise file.error(("group_size",), f"{reason} from one; write at least 2")
            for key, greedy in (("temperature", 0), ("top_k", 1)):
                if getattr(sampling, key) == greedy:
                    raise file.error(("sampling", key), f"{reason} from equal ones; write more than {greedy}")
        if (sampling.top_p < 1 or sampling.top_k) and config.engine.kind == "local":
            is_known = sampling.temperature == 1 and sampling.top_logprobs >= max(1, sampling.top_k)
            if not is_known or (sampling.top_p < 1 and sampling.top_k):
                reason = "top_p and top_k leave ids out, and a trainer has to know which; write one of them, with"
                raise file.error(("sampling", "top_logprobs"), f"{reason} as many as are kept, and temperature 1")
        if section.kl:
            self._trainer.create_model(_START, lora=replace(policy.lora, rank=1))

    def learn(self, groups: Sequence[Group], step: int, log: TrainingLog, figures: dict[str, float]) -> float:
        """Take a step on the episodes of `groups`; write its figures, with `figures`.

        Returns the largest mismatch of the tokens that the current weights have sampled, NaN without any. Raises
        `RolloutsError`, before the optimizer's step, where the mismatch is too large.
        """
        samples = self._samples(groups, step, figures)
        if self._section.kl:
            samples = self._near_the_start(samples, groups, figures)
        self._shortest = min(samples, key=len)
        minibatches = self._minibatches(samples, step)
        logprobs: list[np.ndarray] = [np.empty(0)] * len(samples)
        results: list[LossResult] = []
        # A correction compares with the log-probabilities of all samples from before the first step.
        first: list[int] = []
        if minibatches and not self._section.correction:
            first = [index for index in minibatches[0] if self._has_gradient(samples[index])]
            results.append(self._forward_backward(samples, minibatches[0], logprobs))
            _put(logprobs, first, results[0])
        rest = sorted({*range(len(samples))}.difference(first))
        if rest:
            data = [datum_from_sample(samples[index], self._section.loss) for index in rest]
            _put(logprobs, rest, self._trainer.forward(NAME, data, self._section.loss, self._options))
        version = self._policy.version(step - 1)
        report = _report(samples, logprobs, version)
        mismatch = self._check(samples, report, step, log, figures)
        rate = learning_rate(self._section, step)
        norms = []
        for number, indices in enumerate(minibatches):
            if number or not first:
                results.append(self._forward_backward(samples, indices, logprobs))
            if results[-1].logprobs:  # AdamW moves weights without a gradient, too
                norms.append(self._trainer.optim_step(NAME, replace(self._adam, learning_rate=rate))["grad_norm"])
        figures |= _means([result.metrics for result in results])
        figures |= {"grad_norm": float(np.mean(norms)) if norms else 0.0, "learning_rate": rate}
        figures["entropy"] = -float(np.mean(report.compared.sampler))
        log.write(step, figures, mismatch=report)
        return mismatch

    async def check_engine(self, engine: Engine, step: int) -> float:
        """The largest mismatch of tokens that the engine samples with the new weights, after a prompt of the step.

        For the modes in which steps have no samples of the weights that they train, and so nothing to compare.
        Raises `RolloutsError` where their mean mismatch is too large.
        """
        row = self._shortest
        start = int(np.argmax(row.loss_mask))
        prompt, media = row.token_ids[:start], [each for each in row.media if each[1].end <= start]
        request = GenerateRequest(
            prompt.tolist(),
            SamplingParams(max_tokens=_COMPARED_TOKENS, seed=step),
            MultiModalData.from_items(media) if media else None,
            placeholder_token_ids=self._policy.renderer.placeholder_token_ids,
        )
        (completion,) = await generated(engine, request, None)
        ids = np.concatenate([prompt, completion.token_ids])
        data = [Datum(ids[:-1], ids[1:], media=media)]
        (of_trainer,) = (await asyncio.to_thread(self._trainer.forward, NAME, data, "cross_entropy")).logprobs
        differences = np.abs(completion.logprobs - of_trainer[start - 1 :])
        if differences.mean() > self._limit:
            raise RolloutsError(
                f"after step {step} the log-probabilities of sampler and trainer differ by {differences.mean():.1e} "
                f"nats on average in {len(differences)} tokens, and train.max_mismatch is {self._limit:g}: the engine "
                "has other weights, or computes otherwise. --resume continues from the newest checkpoint"
            )
        return float(differences.max())

    def warm_start(self, tasks: Sequence[Task], log: TrainingLog) -> None:
        """Supervised steps on the conversations of the tasks, which each pass shuffles."""
        section = self._supervised
        assert section is not None  # who has conversations
        samples = supervised_samples(self._policy.renderer, tasks, section, longest=self._trainer.max_length)
        order = np.random.default_rng(self._seed)
        queue: list[int] = []
        for step in range(1, section.steps + 1):
            while len(queue) < min(section.batch, len(samples)):
                queue += order.permutation(len(samples)).tolist()
            chosen, queue = queue[: section.batch], queue[section.batch :]
            tokens = sum(int(samples[index].loss_mask.sum()) for index in chosen)
            data = _divided([datum_from_sample(samples[index], "cross_entropy") for index in chosen], "weights", tokens)
            loss = self._trainer.forward_backward(NAME, data, "cross_entropy").metrics["loss:sum"]
            rate = _warmed_up(section.learning_rate, section.warmup_steps, step)
            self._trainer.optim_step(NAME, replace(self._adam, learning_rate=rate))
            # Before the first step on rewards: training.jsonl has ascending steps.
            log.write(step - section.steps, {"supervised_loss": loss})

    def _samples(self, groups: Sequence[Group], step: int, figures: dict[str, float]) -> list[TrainingSample]:
        section, renderer = self._section, self._policy.renderer
        played = [(group, index, episode) for group in groups for index, episode in group.succeeded()]
        if not played:
            errors = [episode.error for group in groups for episode in group.episodes]
            raise RolloutsError(f"step {step}: every episode failed; the first error: {errors[0]:.1000}")
        rewards = [float(group.rewards[index]) for group, index, _ in played]
        names = [group.task.task_id for group, _, _ in played]
        advantages = group_advantages(rewards, names, baseline=section.baseline, scale=section.scale)
        figures["equal_rewards"] = len(degenerate_groups(rewards, names)) / len(set(names))
        samples = []
        for (group, index, episode), advantage in zip(played, advantages.tolist(), strict=True):
            weighted = advantage * float(group.sample_weights[index])
            samples += samples_from_trajectory(episode, advantage=weighted, processors=renderer.processors)
        # What follows the last trained token has no part in a loss, and may be an image, which no row ends with.
        trained = [
            truncate_sample(sample, int(places[-1]) + 2)[0]
            for sample in samples
            if len(places := np.flatnonzero(sample.loss_mask[1 : section.max_row_tokens]))
        ]
        if not trained:
            reason = "no row has a trained token; raise train.max_row_tokens, which cuts rows at their ends"
            raise RolloutsError(f"step {step}: {reason}")
        return trained

    def _near_the_start(
        self, samples: Sequence[TrainingSample], groups: Sequence[Group], figures: dict[str, float]
    ) -> list[TrainingSample]:
        """The samples with the advantages of a penalty for the distance to the base model (k1 of each token)."""
        # A loss with the sampler's log-probabilities: the base model's are then among the same kept ids.
        data = [datum_from_sample(sample, "importance_sampling") for sample in samples]
        start = self._trainer.forward(_START, data, "importance_sampling").logprobs
        weights = {
            episode.episode_id: self._section.kl * weight
            for group in groups
            for episode, weight in zip(group.episodes, group.sample_weights.tolist(), strict=True)
        }
        penalised, distances = [], []
        for sample, of_start in zip(samples, start, strict=True):
            distance = np.zeros(len(sample), np.float32)
            distance[1:] = np.where(sample.loss_mask[1:], sample.logprobs[1:] - of_start, 0)
            penalty = weights[sample.name.rpartition("/")[0]] * distance
            penalised.append(replace(sample, advantages=sample.advantages - penalty))
            distances.append(distance[sample.loss_mask])
        figures["kl_to_start"] = float(np.mean(np.concatenate(distances)))
        return penalised

    def _has_gradient(self, sample: TrainingSample) -> bool:
        return self._section.loss in _WITHOUT_ADVANTAGES or bool(sample.advantages[1:][sample.loss_mask[1:]].any())

    def _minibatches(self, samples: Sequence[TrainingSample], step: int) -> list[list[int]]:
        """The numbers of the samples of each optimizer step; none where no sample has a gradient."""
        # The samples of a group stay together: what they begin with is computed once.
        by_group: dict[str, list[int]] = {}
        for number, sample in enumerate(samples):
            by_group.setdefault(sample.name.rsplit("/", 2)[0], []).append(number)
        taught: list[list[int]] = []
        others: list[list[int]] = []
        for numbers in by_group.values():
            has_gradient = any(self._has_gradient(samples[number]) for number in numbers)
            (taught if has_gradient else others).append(numbers)
        count = min(self._section.minibatches, len(taught))
        found: list[list[int]] = []
        for epoch in range(self._section.epochs if count else 0):
            drawn = np.random.default_rng([self._seed, step, epoch])
            parts = [np.array_split(drawn.permutation(len(groups)), count) for groups in (taught, others)]
            for of_taught, of_others in zip(*parts, strict=True):
                chosen = [taught[index] for index in sorted(of_taught)] + [others[index] for index in sorted(of_others)]
                found.append([number for numbers in chosen for number in numbers])
        return found

    def _forward_backward(
        self, samples: Sequence[TrainingSample], indices: Sequence[int], start: Sequence[np.ndarray]
    ) -> LossResult:
        """Add the gradient of the mean over the tokens or episodes of a minibatch, the samples at `indices`.

        Those without a gradient are not computed; they count in the number that divides the sum, which is
        done by dividing what the sum is linear in. `start`: log-probabilities (n - 1,) of each sample before
        the first step on it, for a correction.
        """
        section, loss = self._section, named_loss(self._section.loss)
        chosen = [samples[index] for index in indices]
        trained = [sample.loss_mask[1:] for sample in chosen]
        computed = chosen if section.correction else filter(self._has_gradient, chosen)
        data = [datum_from_sample(sample, section.loss) for sample in computed]
        figures: dict[str, float] = {}
        if section.correction:
            before = LossResult([start[index] for index in indices], {})
            data, found = corrected_data(data, loss, section.correction, lambda: before)
            trained = [datum.inputs[loss.mask_name] for datum in data]
            figures = {f"correction_{name}": value for name, value in found.items()}
        tokens = sum(int(mask.sum()) for mask in trained)
        episodes = {sample.name.rpartition("/")[0] for sample, mask in zip(chosen, trained, strict=True) if mask.any()}
        count = max(1, tokens if section.mean_over == "tokens" else len(episodes))
        linear = "beta" if section.loss == "dro" else "coefficient"
        options = {name: value / count if name == linear else value for name, value in self._options.items()}
        factor = "weights" if section.loss == "cross_entropy" else "advantages"
        data = [datum for datum in data if section.loss in _WITHOUT_ADVANTAGES or datum.inputs[factor].any()]
        if not data:  # a correction rejects every token with an advantage
            return LossResult([], figures)
        result = self._trainer.forward_backward(NAME, _divided(data, factor, count), section.loss, options)
        return result._replace(metrics={**result.metrics, **figures})

    def _check(
        self,
        samples: Sequence[TrainingSample],
        report: MismatchReport,
        step: int,
        log: TrainingLog,
        figures: dict[str, float],
    ) -> float:
        """Raise `RolloutsError`, after an entry in the log, for a row of the current weights beyond the limit.

        Returns their largest mismatch.
        """
        means, lags = _by_sample(report, step - 1)
        figures["staleness"] = float(np.mean(lags)) if len(lags) else 0.0
        worst = int(np.argmax(means))
        if means[worst] <= self._limit:
            return max(np.abs(report.compared.difference[lags == 0]).tolist(), default=math.nan)
        log.write(step, figures, mismatch=report)
        examined = [samples[index] for index in np.argsort(-means, kind="stable")[:_EXAMINED]]
        with self._policy.applied() as model:
            batch = TrainingBatch.from_samples(examined, pad_id=0)
            text, _, _ = diagnosis_text(diagnose_mismatch(model, batch)).partition("\n\n")  # without all hypotheses
            cause = "; ".join(line.strip() for line in text.splitlines())
        raise RolloutsError(
            f"step {step} was not taken: in {samples[worst].name} the log-probabilities of sampler and trainer differ "
            f"by {means[worst]:.1e} nats on average, and train.max_mismatch is {self._limit:g}. The episodes of the "
            f"step are in trajectories.mmr, until --resume begins the step again. {cause}"
        )


def supervised_samples(
    renderer: TemplateRenderer, tasks: Sequence[Task], section: SupervisedSection, *, longest: int | None = None
) -> list[TrainingSample]:
    """The rows of conversations, each of at most `longest` tokens. Raises `RolloutsError`, which names the task."""
    samples: list[TrainingSample] = []
    for task in tasks:
        messages = task.data["messages"]
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        mask = [index == last for index in range(len(messages))] if section.turns == "last" else None
        try:
            built = build_training_samples(renderer, messages, tools=task.data.get("tools"), message_loss_mask=mask)
        except RendererError as error:
            raise RolloutsError(f"[supervised], task {task.task_id:.80}: {error}") from error
        for each in built:
            if longest is not None and len(each) > longest:
                reason = f"{len(each):,} tokens, and the model reads {longest:,}; shorten or remove it"
                raise RolloutsError(f"[supervised], task {task.task_id:.80}: {reason}")
        samples += [sample_from_rendered(each, name=task.task_id) for each in built if any(each.loss_mask[1:])]
    if not samples:
        raise RolloutsError("[supervised]: no row has a trained token; write answers of the assistant")
    return samples


def learning_rate(section: TrainSection, step: int) -> float:
    """The learning rate of a step, which counts from 1."""
    progress = (step - 1) / section.steps
    left = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    share = 1.0 if section.schedule == "constant" else section.final_rate
    decay = share + (1 - share) * left[section.schedule]
    return _warmed_up(section.learning_rate * decay, section.warmup_steps, step)


def _warmed_up(rate: float, warmup_steps: int, step: int) -> float:
    return rate * min(1.0, step / max(warmup_steps, 1))


def _divided(data: Sequence[Datum], name: str, count: int) -> list[Datum]:
    """The rows with one of their inputs divided."""
    return [replace(row, inputs={**row.inputs, name: row.inputs[name] / np.float32(count)}) for row in data]


def _put(logprobs: list[np.ndarray], indices: Sequence[int], result: LossResult) -> None:
    for index, values in zip(indices, result.logprobs, strict=True):
        logprobs[index] = values


def _means(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over minibatches: `loss`, and what a loss with ratios adds, `ratio` and `clipped`."""
    names = dict.fromkeys(name for each in metrics for name in each)
    return {name.partition(":")[0]: float(np.mean([each[name] for each in metrics if name in each])) for name in names}


def _report(samples: Sequence[TrainingSample], logprobs: Sequence[np.ndarray], version: str) -> MismatchReport:
    batch = TrainingBatch.from_samples(samples, pad_id=0, layout="packed")
    rows = [np.concatenate([[0.0], values]) for values in logprobs]
    return mismatch_report(batch, torch.from_numpy(np.concatenate(rows))[None], trainer_version=version)


def _by_sample(report: MismatchReport, step: int) -> tuple[np.ndarray, np.ndarray]:
    """For each sample the mean |difference| of the tokens that the weights after `step` sampled, and all lags.

    Versions are those of `Policy.version`; tokens without one count as sampled by these weights.
    """
    compared = report.compared
    places = [int(version.rpartition("@")[2]) for version in compared.versions]
    lags = step - np.array([*places, step])[compared.version]
    fresh = lags == 0
    differences = np.bincount(compared.sample[fresh], np.abs(compared.difference[fresh]), minlength=len(compared.names))
    tokens = np.bincount(compared.sample[fresh], minlength=len(compared.names))
    return differences / np.maximum(tokens, 1), lags
