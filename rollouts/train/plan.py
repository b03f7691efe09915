"""What a training run will do, and about how much memory and time it needs, as `--dry-run` prints it."""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from rich.console import Console
from torch.autograd.graph import saved_tensors_hooks

from rollouts.engines.local import LocalEngine
from rollouts.engines.protocol import GenerateRequest
from rollouts.run_config.output import OutputDirectory
from rollouts.run_config.run_parts import RunParts
from rollouts.run_config.sections import LocalEngineSection, TrainSection
from rollouts.task import Task
from rollouts.train.learning import Learner, supervised_samples
from rollouts.train.policy import NAME, Policy
from rollouts.training.trainer import Datum

_COMPLETION_TOKENS: Final = 32
_ROW_TOKENS: Final = 1024


def print_plan(
    parts: RunParts,
    section: TrainSection,
    output: OutputDirectory,
    request: GenerateRequest,
    held_out: Iterable[Task] | None,
    conversations: Sequence[Task] | None,
    console: Console,
) -> None:
    """Print steps, evaluations and supervised rows; memory and seconds of a step, measured on a few rows.

    `request` is the first one. Raises as the run would for what is found before its first step.
    """
    config = parts.file.config
    episodes, turns, most = section.groups * config.group_size, config.limits.max_turns, config.sampling.max_tokens
    of_turns = "" if turns is None else f" of at most {turns} turns"
    lines = [f"a step: {episodes:,} episodes{of_turns}, {most:,} tokens each turn"]
    if len(request.prompt_ids) >= (section.max_row_tokens or math.inf):
        reason = f"the first prompt has {len(request.prompt_ids):,} tokens, so that no completion would be trained"
        raise parts.file.error(("train", "max_row_tokens"), f"{reason}; write more")
    policy = Policy(parts, section, output.weights)
    trainer = policy.trainer
    Learner(policy, parts.file, section)
    if (supervised := config.supervised) is not None and conversations is not None:
        rows = supervised_samples(policy.renderer, conversations, supervised, longest=trainer.max_length)
        size, answers = min(supervised.batch, len(rows)), sum(int(row.loss_mask.sum()) for row in rows)
        lines.append(f"supervised: {supervised.steps:,} steps of {size:,} of {len(rows):,} rows ({answers:,} tokens)")
    if held_out is not None:
        evaluation = config.evaluation
        times = 1 + math.ceil(section.steps / evaluation.every)
        count = sum(1 for _ in held_out)
        lines.append(f"evaluation: {times:,} times {count:,} tasks, {evaluation.samples:,} episodes of each")
    training, kept = _training_of_a_token(policy, request, config.group_size)
    row_tokens = len(request.prompt_ids) + most * (turns or 1)
    tokens = episodes * min(row_tokens, section.max_row_tokens or row_tokens)
    model = sum(each.numel() * each.element_size() for each in trainer.model.parameters())
    trained = 4 * trainer.num_parameters(NAME)  # in float32
    memory = {"model": model, "gradients and AdamW": 3 * trained, "a pass": kept * min(tokens, section.tokens_per_pass)}
    seconds = f"{tokens * section.epochs * training:.2g} s of training"
    if section.lora_rank:
        memory["adapter"] = trained
    if isinstance(config.engine, LocalEngineSection):
        if not section.lora_rank:
            memory["the engine's copy"] = model
        sampling = section.groups * (turns or 1) * most * _sampling_of_a_token(policy, request, config.group_size)
        seconds = f"{sampling:.2g} s of sampling, {seconds}"
    listed = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in memory.items())
    lines.append(f"memory, estimated: at least {sum(memory.values()) / 1e9:.3g} GB ({listed})")
    lines.append(f"a step, estimated: {seconds}")
    console.print(*lines, sep="\n", soft_wrap=True, highlight=False)


def _training_of_a_token(policy: Policy, request: GenerateRequest, group_size: int) -> tuple[float, float]:
    """Seconds of forward and backward pass, and the bytes that the first keeps for the second, by tokens of rows."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.trainer.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    data = []
    for row in range(max(1, min(group_size, _ROW_TOKENS // len(request.prompt_ids)))):
        # Rows of a group begin with the same prompt, and have other completions.
        ids = np.concatenate([np.asarray(request.prompt_ids), (np.arange(_COMPLETION_TOKENS) + row) % 50])
        data.append(Datum(ids[:-1], ids[1:], media=request.media))
    for _ in range(2):  # the first one is slower
        kept.clear()
        started = time.perf_counter()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.trainer.forward_backward(NAME, data, "cross_entropy")
    tokens = sum(map(len, data))
    return (time.perf_counter() - started) / tokens, sum(kept.values()) / tokens


def _sampling_of_a_token(policy: Policy, request: GenerateRequest, group_size: int) -> float:
    """Seconds for a token of each of `group_size` completions, which are sampled together."""
    most = min(request.sampling.max_tokens, _COMPLETION_TOKENS)

    async def sample() -> float:
        engine = LocalEngine(policy.trainer.model, lock=policy.trainer.lock)
        started = time.perf_counter()
        await engine.generate(replace(request, sampling=replace(request.sampling, n=group_size, max_tokens=most)))
        await engine.close()
        return (time.perf_counter() - started) / most

    return asyncio.run(sample())
